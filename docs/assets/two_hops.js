/* Time of an all-reduce between equal hosts, as shoal.decide.server_assignment computes it.
   tests/unit/test_site_figure.py compares the two. */
"use strict";

const TwoHops = {
  /* Seconds of a ring: 2 (n - 1) steps of 1/n of the bytes. */
  ringSeconds(numBytes, numHosts, hostBandwidth) {
    return (2 * (numHosts - 1) * numBytes) / (numHosts * hostBandwidth);
  },

  /* Seconds of two hops with the best mix of helpers and servers on the hosts.
     Until the helpers are worth as much as the hosts (kappa = n) all links finish at the same moment. */
  twoHopSeconds(numBytes, numHosts, hostBandwidth, numHelpers, helperBandwidth) {
    if (numHosts === 1) return 0;
    const n = numHosts;
    const kappa = Math.min((numHelpers * helperBandwidth) / hostBandwidth, n);
    return (2 * n * (n - 1) * numBytes) / ((n * n + kappa * n - 2 * kappa) * hostBandwidth);
  },

  /* Part of the bytes that the helpers sum. */
  helperShare(numHosts, hostBandwidth, numHelpers, helperBandwidth) {
    const n = numHosts;
    const kappa = Math.min((numHelpers * helperBandwidth) / hostBandwidth, n);
    return n === 1 ? 0 : (2 * kappa * (n - 1)) / (n * n + kappa * n - 2 * kappa);
  },
};
