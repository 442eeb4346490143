"""The model inside the embedded engine: configuration, weights, forward pass, KV cache, sampling."""
