"""Starts workers: ``local`` on this host or by hand on several, ``emulated_job`` on emulated hosts."""
