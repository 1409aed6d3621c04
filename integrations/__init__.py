"""One module per framework, each imported only when it is used."""
