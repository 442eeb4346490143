"""Results of evaluations of a model: estimates with confidence intervals, files, table and plot; reads no network."""
