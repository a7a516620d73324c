"""The fixed questions on whose answers an export is proved: several kinds of text, none of them from a benchmark."""

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that adds two numbers and explain it.",
    "Give me three tips for sleeping better.",
    "Tell me a very short story about a fox.",
    "Translate to French: Good morning, how are you today?",
    "A train travels 60 km in one hour. How far does it travel in three and a half hours?",
    "Summarise in two sentences: The library opens at nine and closes at six. On Sundays it stays shut. Members may "
    "borrow ten books for a month, and renew them twice unless somebody else has asked for them.",
    "Explain to a child why the sky is blue.",
    "List five vegetables that grow well in cold weather.",
    "Write a polite e-mail that asks a colleague to move a meeting to Thursday.",
    "What is the difference between a virus and a bacterium?",
    "Correct the grammar: She don't likes going to the market on Mondays.",
    "Extract the names and dates: Anna met Peter on 3 May 1998, and they married on 12 June 2001.",
    "What are the steps to change a bicycle tyre?",
    "Write a haiku about the sea.",
    "Is 91 a prime number? Explain your answer.",
    "Describe what a database index does.",
    "Pretend that you are a pirate and introduce yourself.",
    "Write a JSON object that describes a book with a title, an author and a year.",
    "What should I pack for a weekend in the mountains?",
    "Rewrite this in a formal tone: hey, can't come tomorrow, got a cold, sorry!",
    "According to this text, who won? The final was played in Rome. Brazil led twice, but Italy won in extra time.",
    "Name the planets of the solar system in order.",
    "Give two arguments for and two against working from home.",
)
