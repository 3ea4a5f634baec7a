"""HTTP as every service serves it: uvicorn with its limits drawn.

The library bounds neither how many connections there are, nor the head of a request, nor the time in which
one must arrive or an answer must be taken. Here each of these has a bound, so that no caller holds more of a
process than a little, or holds it for ever. What is past a bound is answered in the form of all refusals
where an answer can still be understood, and then cut off. All bounds are of one process: behind a proxy every
caller has the same address, so addresses are not told apart.
"""
