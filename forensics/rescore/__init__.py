"""`penstock rescore`: other rewards for stored groups, as the input of another run; may import the console's record and tools."""
