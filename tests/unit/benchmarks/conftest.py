"""The benchmarks are no part of the package: make ``import benchmarks`` work from any folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
