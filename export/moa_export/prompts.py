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

#: Questions of the same kinds, on whose answers weights are rounded: a proof on the same ones would flatter.
CALIBRATION_PROMPTS = (
    "Which river flows through Cairo, and where does it end?",
    "Write a Python function that reverses a string, with a docstring.",
    "How can I learn to cook in a month?",
    "Tell me about a boy who finds an old key.",
    "Translate to Spanish: The shop is closed on Sundays.",
    "A box holds 12 eggs. How many boxes are needed for 90 eggs?",
    "Summarise: The council met on Monday. It decided to plant two hundred trees along the canal and to close the old "
    "bridge until spring, because its railings are loose.",
    "Explain what inflation is in simple words.",
    "Make a list of things to check before a long drive.",
    "Write a short thank-you note to a neighbour who watered the plants.",
    "How does a solar panel make electricity?",
    "Extract all place names: We drove from Lyon to Geneva and stopped in Annecy for lunch.",
    "Rewrite more simply: The aforementioned documentation is hereby rendered obsolete.",
    "Pretend to be a museum guide and welcome the visitors.",
    "Compare cats and dogs as pets.",
    "Based on this text, when does the train leave? The 9:40 to Leeds is delayed by 25 minutes.",
)
