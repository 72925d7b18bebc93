"""The HTML page of one run or of several side by side, from their records alone.

1. ``runs`` reads records and says what happened: state, process groups, scores, where the time went.
2. ``curves`` thins and smooths a series so that a page of a long run stays small and readable.
3. ``plots`` draws one figure as SVG whose colours follow the page's style sheet.
4. ``charts`` decides which figures a page has, ``tables`` which tables; ``words`` writes numbers and units.
5. ``page`` fills ``page.html.jinja`` and ``page.css`` and puts the file in its place.
"""
