/* The figure of "When helper hosts pay": sliders, four results, and the time over the number of helper hosts. */
"use strict";

(() => {
  const place = document.getElementById("helpers-figure");
  if (!place) return;

  const GBITS = [1, 2.5, 5, 10, 25, 40, 50, 100, 200, 400];
  const MODELS = [[25.6e6, "ResNet-50"], [110e6, "BERT-base"], [335e6, "BERT-large"], [1.24e9, "Llama 1B"], [2.85e9, "T5-3B"]];
  const sizes = [];
  for (let exponent = 1; exponent < 5; exponent += 1)
    for (const digit of [10, 15, 20, 30, 44, 60, 80]) sizes.push(digit * 10 ** (exponent - 1));

  const sliders = [
    { key: "hosts", label: "Worker hosts", values: range(2, 64), start: 8, show: String },
    { key: "helpers", label: "Helper hosts", values: range(0, 128), start: 4, show: String },
    { key: "host", label: "Link of a worker host", values: GBITS, start: 10, show: gbit },
    { key: "helper", label: "Link of a helper host", values: GBITS, start: 10, show: gbit },
    { key: "size", label: "Gradient", values: sizes, start: 440, show: gradient },
  ];

  function range(first, last) {
    return Array.from({ length: last - first + 1 }, (_, i) => first + i);
  }
  function gbit(value) {
    return `${value} Gbit/s`;
  }
  function bytes(megabytes) {
    return megabytes < 1000 ? `${round(megabytes)} MB` : `${round(megabytes / 1000)} GB`;
  }
  function gradient(megabytes) {
    const parameters = (megabytes * 1e6) / 4;
    const near = MODELS.find(([count]) => Math.abs(Math.log(count / parameters)) < 0.12);
    return `${bytes(megabytes)} in fp32${near ? ` (${near[1]})` : ""}`;
  }
  function round(value) {
    return value >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
  }
  function seconds(value) {
    return value < 0.1 ? `${round(value * 1000)} ms` : `${round(value)} s`;
  }

  const values = Object.fromEntries(sliders.map((slider) => [slider.key, slider.start]));
  const form = document.createElement("div");
  form.className = "sliders";
  for (const slider of sliders) {
    const row = document.createElement("label");
    const name = document.createElement("span");
    const shown = document.createElement("output");
    const input = document.createElement("input");
    Object.assign(input, { type: "range", min: 0, max: slider.values.length - 1, step: 1 });
    input.value = slider.values.indexOf(slider.start);
    name.textContent = slider.label;
    const read = () => {
      values[slider.key] = slider.values[Number(input.value)];
      shown.textContent = slider.show(values[slider.key]);
      input.setAttribute("aria-valuetext", shown.textContent);
    };
    input.addEventListener("input", () => { read(); draw(); });
    read();
    row.append(name, shown, input);
    form.append(row);
  }
  const results = document.createElement("div");
  results.className = "results";
  const chart = document.createElement("div");
  place.replaceChildren(form, results, chart);

  function draw() {
    const { hosts, helpers } = values;
    const [host, helper, numBytes] = [(values.host * 1e9) / 8, (values.helper * 1e9) / 8, values.size * 1e6];
    const ring = TwoHops.ringSeconds(numBytes, hosts, host);
    const time = (count) => TwoHops.twoHopSeconds(numBytes, hosts, host, count, helper);
    const now = time(helpers);
    const share = TwoHops.helperShare(hosts, host, helpers, helper);
    const enough = Math.ceil((hosts * host) / helper);
    const cells = [
      ["Ring, or no helpers", seconds(ring)],
      ["Two hops", seconds(now)],
      ["Speedup", `${(ring / now).toFixed(2)}×`],
      ["Summed by helpers", `${(100 * share).toFixed(0)} %`],
    ];
    results.replaceChildren(...cells.map(([name, value]) => {
      const cell = document.createElement("div");
      const strong = document.createElement("strong");
      strong.textContent = value;
      cell.append(strong, name);
      return cell;
    }));
    chart.innerHTML = picture({ ring, time, helpers, now, enough, hosts });
  }

  /* The chart as SVG: as wide as the text of a phone, so that its letters stay readable there. */
  function picture({ ring, time, helpers, now, enough, hosts }) {
    const [width, height, left, right, top, bottom] = [440, 270, 58, 14, 18, 44];
    const most = Math.max(enough * 1.5, helpers * 1.1, 4);
    const highest = ring * 1.12;
    const x = (count) => left + ((width - left - right) * count) / most;
    const y = (value) => top + (height - top - bottom) * (1 - value / highest);
    const counts = [...range(0, 200).map((part) => (part * most) / 200), enough].sort((a, b) => a - b);
    const points = counts.map((count) => `${x(count).toFixed(1)} ${y(time(count)).toFixed(1)}`);
    const step = niceStep(most / 5, [1, 2, 5]);
    const rise = niceStep(highest / 4, [1, 2, 2.5, 5]);
    let grid = "";
    for (let count = 0; count <= most; count += step)
      grid += `<text class="soft mid" x="${x(count)}" y="${height - 24}">${count}</text>`;
    for (let value = 0; value <= highest; value += rise)
      grid += `<path class="line" opacity=".45" d="M${left} ${y(value)}H${width - right}"/>` +
        `<text class="soft end" x="${left - 6}" y="${y(value) + 5}">${value === 0 ? "0" : seconds(value)}</text>`;
    const least = time(Math.ceil(most));
    const flip = x(helpers) > width / 2;
    const label = hosts === 2 ? "two hosts: helpers change nothing" : `${enough} helpers are enough: M / B`;
    return `<svg class="picture" role="img" viewBox="0 0 ${width} ${height}" aria-label="${
      helpers} helper hosts: ${seconds(now)} instead of ${seconds(ring)}"><g>${grid}
      <path d="M${left} ${y(ring)}H${width - right}" stroke="var(--b)" stroke-width="2.5" fill="none"/>
      <text x="${width - right}" y="${y(ring) - 7}" class="end" style="fill:var(--b)">ring</text>
      <path d="M${points.join("L")}" stroke="var(--a)" stroke-width="2.5" fill="none"/>
      <text x="${width - right}" y="${y(least) + 20}" class="end" style="fill:var(--a)">${label}</text>
      <path d="M${x(helpers)} ${y(0)}V${y(now)}" class="line" stroke-dasharray="4 4"/>
      <circle cx="${x(helpers)}" cy="${y(now)}" r="6" fill="var(--a)"/>
      <text x="${x(helpers) + (flip ? -10 : 10)}" y="${y(now) - 10}" class="${flip ? "end" : ""}" style="font-weight:600">${
      seconds(now)}</text>
      <text class="mid" x="${(left + width - right) / 2}" y="${height - 5}">helper hosts</text></g></svg>`;
  }

  function niceStep(least, digits) {
    const unit = 10 ** Math.floor(Math.log10(least));
    const step = [...digits, 10].find((digit) => digit * unit >= least * 0.999) * unit;
    return Math.max(step, digits.includes(2.5) ? 0 : 1);
  }

  draw();
})();
