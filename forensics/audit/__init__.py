"""`penstock audit`: the record of a run compared with its streams, objects and reports; may import the console's tools and the protocol."""
