"""Example questions that the built-in models can answer, with their answers.

The page of the server offers the questions; a test asks the model each of them.
"""

ABOUT = (
    "The built-in model solves word problems with numbers, of the kinds below, and knows nothing "
    "else: other questions get wrong answers."
)
QUESTIONS = {
    "A shop has 365 plates. People bring 132 back. A truck brings 64 more. How many plates are "
    "left in the end?": "561",
    "Jill has 351 dollars. Jill earns 62 dollars a day and spends 32 dollars of it. Jill does this "
    "for 6 days. How many dollars does Jill have then?": "531",
    "Fay is 24 years old. 29 years older than Fay is Quinn. Dora is 3 times as old as Quinn. How "
    "old are the three together?": "236",
    "A factory has 28 machines. Each machine makes 12 pencils. 72 of them are bad. The rest goes "
    "into 6 equal parts. How many pencils are in each part?": "44",
}
