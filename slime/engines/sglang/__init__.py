"""Stock SGLang as an engine: its command line, its versions, and the code for weight receipts that
runs inside its processes."""
