"""`penstock data check`: what data files can train, which rows are malformed, and rows as a model or a reward gets them."""
