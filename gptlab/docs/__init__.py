"""Pages beside the reference: how it works, what was measured and how, and what changed.

    $ make docs    # the reference from the docstrings, and these pages: build/docs/index.html

.. include:: how-it-works.md
.. include:: figures.md
.. include:: changelog.md
"""
