"""Stock SGLang as an engine: its command line, its versions, and what runs inside its processes for
weight receipts."""
