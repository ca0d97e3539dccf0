"""`slime watch`: run folders as a live page. `folders` follows them as they grow, `index` searches
their samples, `server` answers requests, and ``static/`` has the page itself."""
