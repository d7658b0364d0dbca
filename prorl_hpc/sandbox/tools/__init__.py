"""What runs inside a sandbox: the tool server and its tools. Standard library and ptyprocess only, and quick to import."""
