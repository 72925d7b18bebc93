"""Imported last by the process that tests fork from: does once what each forked process would do again.

Both took more than half of the processor time of small training jobs: transformers compiles 900 patterns
when a process first saves a model, and the collector visits, and so copies, every page of what is loaded.
"""

from __future__ import annotations

import gc
import os
import sys

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

if others := os.environ.pop("PYTHONPATH").partition(os.pathsep)[2]:  # the first is this folder
    os.environ["PYTHONPATH"] = others
sys.dont_write_bytecode = False  # as conftest.py has it; this process has options of its own
get_checkpoint_conversion_mapping("bert")
gc.collect()
gc.freeze()
