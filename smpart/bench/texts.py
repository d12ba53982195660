"""Prompts of very different lengths in plain English: questions, passages to sum up, and records of any length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTIONS = (
    "Why is the sky blue?",
    "What is the capital of France, and what is it known for?",
    "How does a bicycle stay upright?",
    "Name three things to do on a rainy afternoon.",
    "Why do leaves change colour in autumn?",
    "What is the difference between weather and climate?",
    "How do I keep a cut apple from turning brown?",
    "Explain in one sentence what a prime number is.",
    "Why does ice float on water?",
    "Give me a short rhyme about the moon.",
    "What should I check before I lend somebody my car?",
    "How do bees find their way home?",
    "Why do we have leap years?",
    "Suggest a name for a bakery beside a river.",
    "What makes bread rise?",
    "How far away is the horizon when I stand on a beach?",
    "What is an echo?",
    "Why do onions make us cry?",
    "Write one line of thanks to a good neighbour.",
    "How does a lighthouse help a ship at night?",
)

PASSAGES = (
    "The mill at the bend of the river had ground corn for two hundred years before the new road came. Farmers "
    "used to wait in its yard with their carts, and the waiting was half the reason for coming: prices were "
    "agreed there, and marriages, and now and then a quarrel was ended over a cup of cider. When the road came, "
    "lorries carried the corn to the town in an hour. The miller kept the wheel turning for another eight years, "
    "mostly for visitors, and then the dam gave way in a wet spring and nobody had the money to mend it. The "
    "wheel is still there. Children climb on it in the summer, and the river goes round it as if it had never "
    "been asked to do any work.",
    "A library lends more than books. In our town it lends a drill, two tents, a telescope, a sewing machine and "
    "a set of scales for weighing babies. The drill is out almost every day; the telescope is asked for when "
    "there is a comet in the newspaper. The librarian keeps a list of what is wanted and not there, and once a "
    "year the friends of the library raise money for the three things at the top. Last year they bought a machine "
    "that presses apples. In one autumn it made four thousand litres of juice from fruit that would have been "
    "left under the trees. The machine was broken twice, and both times it was mended by somebody who had come in "
    "only to read the paper.",
    "Snow is quiet because it is mostly air. Between the flakes of a fresh fall there are countless small spaces, "
    "and sound that enters them is turned about until it is gone, much as it is in a thick curtain. As the snow "
    "settles and melts and freezes again, the spaces close and the surface hardens, and then it does the "
    "opposite: an icy field throws voices a long way. People who live in the mountains say that they can hear "
    "what kind of day it is before they open the shutters. A soft silence means that the roads will be closed; a "
    "ringing one, with every footstep clear, means that the cold has come and the snow will bear a sledge.",
    "The bus to the coast left at six, and on market days it was full by the second stop. The driver knew who "
    "would get off where. He knew that the woman with the eggs wanted to be let down at the chapel, although "
    "there was no stop, and that the two brothers had not spoken since the sale of the field and must not be put "
    "beside each other. He had driven the road for thirty years, and in that time had been late for his own "
    "wedding, had delivered one child and had hit one deer. When the company sent him a machine that told him the "
    "time at every stop he thanked them, and put his hat over it.",
    "To plant a hedge, begin in the winter, when the young trees are asleep. Dig a trench as deep as your forearm "
    "and loosen the ground at the bottom, for roots are lazy and go where the going is easy. Set the plants a "
    "foot apart in two rows, and let the rows be out of step, so that each plant stands in a gap of the other "
    "row. Tread the earth down with your heel. Then cut everything back to the height of your knee. This is the "
    "hard part, because it looks like waste, but a hedge that is not cut in its first year is thin at the foot "
    "for the rest of its life, and sheep will walk through it.",
    "The first clocks in the valley did not agree, and nobody minded. The church was ten minutes before the "
    "school, and the school was a quarter of an hour before the station, so that a child who ran could hear the "
    "same hour strike three times. Then the railway sent a man with a watch in a leather case, and he set the "
    "station by the capital. Within a year the school followed, because of the trains, and after a long winter of "
    "argument the church did too. The priest told the people that they had lost twenty-five minutes, and that he "
    "hoped they had not had plans for them.",
)

_WEATHER = ("clear and cold", "grey with a low cloud", "windy from the west", "mild, with rain before noon", "foggy")
_SHIPS = ("the Marigold", "the Anna Hansen", "the Good Intent", "the Petrel", "the Northern Light", "the Two Sisters")
_CARGO = ("timber", "salt", "barley", "slates", "herring", "bricks", "apples", "coal")
_EVENTS = (
    "The lamp was cleaned and the wick trimmed an hour before dusk",
    "A boat came out with the letters and two loaves of bread",
    "The assistant painted the rail on the seaward side",
    "A seal lay on the landing stage and would not be moved",
    "The foghorn was sounded from four until the air cleared",
    "One pane of the lantern was found cracked and was replaced",
    "The barrel of oil opened today was short by a third, and I have written to the harbour office",
    "Three children from the village rowed over to see the light and were given tea",
    "The tide reached the second step of the stair, as it did in the year of the great storm",
    "The garden gave its first beans, which the wind has not allowed before",
)


def record(words: int, number: int) -> str:
    """A lighthouse keeper's log of about `words` words, followed by a request; each `number` gives another log."""
    rng = np.random.default_rng([7, number])

    def pick(options: tuple[str, ...]) -> str:
        return options[int(rng.integers(len(options)))]

    days: list[str] = []
    total = 0
    while total < words:
        day = (
            f"Day {len(days) + 1}. The morning was {pick(_WEATHER)}. {pick(_SHIPS).capitalize()} passed at "
            f"{int(rng.integers(5, 12))} o'clock with {int(rng.integers(8, 60))} tons of {pick(_CARGO)}, bound "
            f"{pick(('north', 'south', 'for the islands', 'for the mouth of the river'))}. {pick(_EVENTS)}. "
            f"{pick(_EVENTS)}. Oil burned in the night: {int(rng.integers(9, 30))} pints."
        )
        days.append(day)
        total += len(day.split())
    return (
        f"From the log of lighthouse number {number + 1}.\n\n" + "\n".join(days) + "\n\nSum up this log for the owner."
    )


def passage(number: int) -> str:
    """A request to sum up one passage; numbers beyond the last passage ask another thing about an earlier one."""
    asks = ("Sum up in one sentence", "Give a title to this text", "Say what the writer thinks in this text")
    ask, text = asks[number // len(PASSAGES) % len(asks)], PASSAGES[number % len(PASSAGES)]
    return f"{ask}:\n\n{text}"


def chat_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of one user turn as the model's chat template writes it, ready for the answer."""
    turn = [{"role": "user", "content": text}]
    written = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return [int(t) for t in tokenizer.encode(str(written), add_special_tokens=False)]
