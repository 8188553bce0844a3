"""Baseline against drafter: run, count, judge, report."""
