"""What people read of a run: terminal, Markdown, GitHub, JUnit and HTML, all from one record.

``text`` makes foreign strings and numbers presentable, ``table`` says which columns there are;
each format only lays them out.
"""
