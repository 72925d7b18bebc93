"""ALBERT (Lan et al. 2019, arXiv 1909.11942): masked-LM and sentence-order pretraining."""
