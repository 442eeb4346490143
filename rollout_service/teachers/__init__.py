"""Teachers: models that are not trained, asked for their log-probabilities of sampled tokens; a kind of server is one file."""
