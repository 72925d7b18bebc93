"""Pieces of a training loop that recipes share: functions that a recipe calls, never a loop of their own."""
