"""One (reference, candidate) pair from inputs to a judged record.

``pair`` holds what a test hands over and the record as it grows; ``terms`` says by what settings
the pair is measured; ``checking`` is accuracy, honesty and stress; ``speed`` times the pair, and
``arms`` its rivals and variants; ``judging`` gives the verdict; ``workbench`` calls them in order.
Nothing is imported here: a process that only serves an arm needs ``pair`` and ``terms`` alone.
"""
