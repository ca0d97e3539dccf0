"""`slime watch`: run folders as a live page. `folders` reads them as they grow, `index` finds
samples among very many, `server` answers, and `page/` is what the browser gets."""
