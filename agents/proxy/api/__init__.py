"""The HTTP side of the proxy: three APIs, each translated into `AgentRequest` and back."""
