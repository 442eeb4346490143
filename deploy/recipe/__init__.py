"""`penstock recipe`: a pretrained model, its data and its run file, then the commands that train it and chat with it."""
