"""Starts workers: ``local`` on this machine or by hand on several. Imports only the nouns."""
