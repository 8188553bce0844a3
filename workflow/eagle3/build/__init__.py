"""Snakemake and DVC in step. No stage imports it."""
