"""What engines are compared on unless text is given: prose, numbers, code and several scripts."""
# ruff: noqa: RUF001

PROMPTS = (
    "The three primary colours are",
    "Question: a train leaves at 9:40 and arrives at 13:05. How long does it travel?\nAnswer:",
    "def fibonacci(n: int) -> int:\n    ",
    "从前有一座山，山上有一座庙，",
)

TEXT = """\
A lighthouse keeper writes down the weather every evening. On Monday the wind blew from the north-west at 23 knots and the \
glass stood at 1012.4 hPa; by Tuesday noon it had fallen to 998.7, and the fishing boats stayed in harbour. "We shall see," she \
told her nephew, who had come to mend the lamp, "whether the old engine starts this time." It did, on the third try.

Three rules hold in this house: doors are closed quietly, letters are answered within a week, and nobody touches the clock. The \
clock has run since 1874 and loses eleven seconds a month, which is why it is set by hand on the first day of each.

def moving_average(values, width):
    total = 0.0
    for index, value in enumerate(values):
        total += value - (values[index - width] if index >= width else 0.0)
        yield total / min(index + 1, width)

SELECT name, COUNT(*) AS n FROM visits WHERE year >= 2019 GROUP BY name HAVING n > 3 ORDER BY n DESC;

Die Brücke über den Fluss wurde im Frühjahr gesperrt; seitdem fährt die Fähre alle zwanzig Minuten. El puente estará cerrado \
hasta el 15 de octubre. 山の上に小さな茶店があり、旅人は皆そこで一休みする。 今天的气温是二十六度，明天可能下雨。 \
Сегодня в порту стоят семь кораблей. {"id": 4711, "tags": ["a", "b\\n"], "ratio": -0.125, "ok": true}

1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610. 7 * 8 = 56; 56 + 144 = 200; 200 / 16 = 12.5. Every number from the \
third on is the sum of the two before it, and the ratio of neighbours comes ever closer to 1.618034 without reaching it.
"""
