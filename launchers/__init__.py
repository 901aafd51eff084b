"""Commands that start the parts of a run; the only readers of flags."""
