"""Builders over transformers and torchvision, with what a recipe changes in them."""
