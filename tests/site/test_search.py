"""Asks the search of the built site, as a browser runs it from a disk, what people ask."""

from __future__ import annotations

import json
from typing import Any

from site_browser import SITE, Browser

# Words that people type, none of them the title of the page that answers
QUESTIONS = {
    "pip install": "start.html",
    "gradient accumulation": "run.html",
    "continue after crash": "exact-resume.html",
    "how often to checkpoint": "run.html",
    "early stopping": "evaluate.html",
    "amp autocast": "precision.html",
    "bfloat16": "precision.html",
    "v100 fp16 loss scaling": "precision.html",
    "parameter server": "served-updates.html",
    "slow network": "local-steps.html",
    "federated averaging": "local-steps.html",
    "stale gradients": "bounded-waiting.html",
    "backup workers": "bounded-waiting.html",
    "slow node": "unequal-hosts.html",
    "quantize gradients": "compression.html",
    "model too big for gpu memory": "pipeline.html",
    "gpipe 1f1b": "pipeline.html",
    "sbatch": "clusters.html",
    "preemption": "clusters.html",
    "k8s": "kubernetes.html",
    "docker": "container.html",
    "mpirun": "ssh.html",
    "how much does it cost": "plan.html",
    "estimate training time": "plan.html",
    "tensorboard": "watch.html",
    "wandb mlflow": "watch.html",
    "fine-tune a classifier": "finetune.html",
    "question answering f1": "squad.html",
    "inference": "use.html",
    "bounding boxes": "detection.html",
    "imagefolder jpeg": "images.html",
    "s3 dataset": "reading-images.html",
    "jsonl corpus": "text.html",
    "optax": "jax.html",
    "hvd.allreduce": "from-horovod.html",
    "migrate nanogpt": "moving.html",
    "hang timeout": "failures.html",
    "simulate a cluster on my laptop": "emulated.html",
    "h100": "gpu.html",
    "smdistributed": "from-the-posts.html",
    "tuning job estimator": "sagemaker.html",
    "python version": "support.html",
    "infiniband efa": "tuning.html",
    "accelerate trainer": "coming-from.html",
    "deepspeed zero": "coming-from.html",
    "training arguments": "coming-from.html",
    "exponential moving average": "run-more.html",
    "fully sharded": "run-more.html",
    "muon gan optimizers": "run-more.html",
    "sample scripts": "examples.html",
    "tls encryption password": "security.html",
    "model.fit": "keras.html",
}
_SEARCH = """(async () => {
  const script = document.createElement("script");
  script.src = "search/search_index.js";
  await new Promise((done) => { script.onload = done; document.head.append(script); });
  const worker = new Worker(JSON.parse(document.getElementById("__config").textContent).search);
  const ask = (message) => new Promise((done) => {
    worker.addEventListener("message", (event) => done(event.data), { once: true });
    worker.postMessage(message);
  });
  await ask({ type: 0, data: { config: __index.config, docs: __index.docs, options: {} } });
  const found = {};
  for (const words of %s) {
    const { items } = (await ask({ type: 2, data: words })).data;
    found[words] = items.map((sections) => sections[0].location.split("#")[0]);
  }
  worker.terminate();
  return found;
})()"""


def ask(browser: Browser, questions: list[str]) -> dict[str, list[str]]:
    """Return the pages that the search finds, the first first."""
    browser.open((SITE / "index.html").as_uri())
    found: dict[str, list[str]] = browser.run(_SEARCH % json.dumps(questions))
    return found


def index() -> list[dict[str, Any]]:
    docs: list[dict[str, Any]] = json.loads((SITE / "search" / "search_index.json").read_text("utf-8"))[
        "docs"
    ]
    return docs


def test_the_first_hit_is_the_page_that_answers(browser: Browser) -> None:
    found = ask(browser, list(QUESTIONS))
    wrong = {words: found[words][:4] for words, page in QUESTIONS.items() if found[words][:1] != [page]}
    assert not wrong, "\n".join(
        f"{words!r}: {pages}, not {QUESTIONS[words]}" for words, pages in wrong.items()
    )


def test_no_question_is_the_title_of_its_page() -> None:
    titles = {one["location"]: one["title"] for one in index()}
    for words, page in QUESTIONS.items():
        assert words.lower() not in titles[page].lower()


def test_experiments_and_files_of_the_repository_are_not_found() -> None:
    pages = {one["location"].partition("/")[0] for one in index() if "/" in one["location"]}
    assert pages == {"concepts", "recipes", "reference", "results"}


def test_the_box_searches_in_a_site_on_a_disk(browser: Browser) -> None:
    browser.resize(1280)
    browser.open((SITE / "run.html").as_uri() + "?q=horovod")
    shown = """new Promise((done) => {
      const first = () => document.querySelector(".md-search-result__item a")?.getAttribute("href");
      const look = () => first() ? done(first()) : setTimeout(look, 50);
      look();
    })"""
    assert "from-horovod.html" in browser.run(shown)
