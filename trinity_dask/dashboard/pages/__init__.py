"""What is drawn: :mod:`run` one stage of one run, :mod:`site` the pages around it.

Invariant: what a run tells is untrusted text. It is put only where a browser runs none of it:
``PreText``, cells of a ``DataTable``, names of axes and lines.
"""
