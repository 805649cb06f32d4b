"""The command line: a client of the server, in this process or on the network."""
