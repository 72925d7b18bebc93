"""Builds models of transformers and torchvision, with the changes that recipes make to them."""
