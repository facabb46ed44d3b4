"""The configuration page: a form in the browser, served from a process of its own."""
