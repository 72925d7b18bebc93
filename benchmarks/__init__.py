"""One script a question: ``python -m benchmarks.NAME [--quick] [--json FILE] [--markdown FILE]``."""
