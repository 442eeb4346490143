"""Tools of MCP servers (docs/environments_of_others.md); the library `mcp` is the client, imported with the first episode."""
