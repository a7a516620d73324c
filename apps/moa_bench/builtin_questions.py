"""Questions for benchmarks of speed and cost, where any everyday mix will do and no file need be at hand."""

from __future__ import annotations

from moa_bench.questions import Question

BUILTIN_QUESTIONS = tuple(
    Question(number, task, (text,))
    for number, (task, text) in enumerate(
        (
            ("qa", "Why is the sky blue during the day and red at sunset?"),
            ("writing", "Write a short letter to a neighbour who looked after my plants while I was away."),
            ("math", "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Explain each step."),
            ("coding", "Write a Python function that returns the longest word in a sentence, and explain it."),
            ("summary", "Sum up in three sentences how a bill becomes a law in a parliament with two chambers."),
            ("qa", "What is the difference between weather and climate?"),
            ("writing", "Tell a bedtime story about a lighthouse keeper and a lost seagull."),
            ("advice", "I have twenty minutes each evening to learn Italian. How should I use them?"),
            ("coding", "Explain what a hash table is, when it is slow, and what one can do about it."),
            ("qa", "How does a vaccine teach the body to recognise a virus?"),
            ("advice", "Suggest a simple dinner with rice, tomatoes, eggs and spinach, step by step."),
            ("math", "A shirt costs 40 euros after a discount of 20 percent. What did it cost before? Show why."),
        ),
        1,
    )
)
