"""Makes the HTML page of one run or of several side by side, from their records alone.

1. ``runs`` reads records and derives state, process groups, scores and times.
2. ``curves`` thins and smooths a series so that a page of a long run stays small and readable.
3. ``plots`` draws one figure as SVG with colours from the page's style sheet.
4. ``charts`` selects the figures of a page, ``tables`` fills its tables; ``formatting`` formats numbers.
5. ``page`` fills ``page.html.jinja`` and ``page.css`` and writes the file.
"""
