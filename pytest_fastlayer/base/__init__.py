"""The candidate of another revision in the same run: ``--fastlayer-base=REV``.

``trees`` finds the revision and checks it out; ``child``, ``server`` and ``arms`` run one test of
a tree in a process of its own and hand its pair over to be commanded; ``client`` is the other end;
``rounds`` times three arms in balanced orders; ``witness`` sees to it that they compute meanwhile;
``threeway`` makes the record of it all, and
``judging`` the verdict.
``trees`` and ``protocol`` import nothing heavy.
"""
