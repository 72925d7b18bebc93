"""shoal trains PyTorch models on many machines in the least time.

Packages re-export nothing: write ``from shoal.optim.lamb import Lamb``. The way through the house, from
raw text to a report, is told in ``docs/README.md``; the command line is ``shoal --help``.
"""

__version__ = "0.1.0"
