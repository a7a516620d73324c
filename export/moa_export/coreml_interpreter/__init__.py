"""Core ML's ML programs, read back from an ``.mlpackage`` and computed with numpy.

Core ML runs on Apple's systems only. Elsewhere this evaluator stands in for it, so that an export can be
checked on the machine that made it: the same file, the same inputs, the same rounding to float16 after every
operator. What it cannot show is what a device adds to that, such as sums in float16 or a defect of a driver.
"""
