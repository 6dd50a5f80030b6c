"""Word lists the generators draw from. Plain data."""

from __future__ import annotations

NAMES = tuple(
    "Anna Ben Clara David Emma Felix Grace Hugo Ivy Jack Kate Leo Maria Noah Olga Paul Quinn Rosa Sam Tina Uma "
    "Victor Wendy Xavier Yara Zoe Adam Bella Carl Diana Eric Fiona George Helen Ian Julia Kevin Laura Mark Nina "
    "Oscar Petra Ralph Sara Tom Ursula Vera Will Alice Bruno Cora Dora Edgar Frida Gina Henry Ines Jonas Karen "
    "Lucas".split()
)
CITIES = tuple(
    "Paris Rome Berlin Madrid Lisbon Vienna Prague Dublin Oslo Athens Cairo Tokyo Osaka Seoul Beijing Delhi "
    "Mumbai Lima Bogota Boston Chicago Dallas Denver Miami Toronto Sydney Perth Nairobi Lagos Accra Warsaw Geneva "
    "Zurich Milan Turin Naples Porto Bergen Bristol London Leeds York Helsinki Riga Tallinn Sofia Munich Hamburg "
    "Lyon Nice".split()
)
COLOURS = tuple(
    "red blue green yellow black white brown grey pink purple orange golden silver violet teal beige".split()
)
NOUNS = tuple(
    "lamp box chair table bottle basket mirror candle clock drum flute guitar hammer helmet jacket kettle ladder "
    "letter map medal necklace paddle pencil pillow ring rope scarf shield shovel spoon statue suitcase sword "
    "tent ticket torch towel trumpet umbrella vase violin wallet watch wheel whistle anchor apron barrel bell "
    "bench blanket bowl bucket cabinet camera carpet chest coin comb cup door drawer feather fork gate glove hat "
    "key kite knife lantern lens lock magnet needle notebook oven parcel piano plate pot puzzle quilt robot "
    "saddle sofa stone stove tray wagon".split()
)
ADJECTIVES = tuple(
    "old new small large heavy light round square broken shiny wooden metal plastic ancient modern tiny huge "
    "dusty clean smooth rough painted hidden wet dry warm cold soft hard striped narrow wide tall short plain "
    "rare simple quiet strange lucky famous empty full".split()
)
PLACES = tuple(
    "kitchen garden library garage attic cellar office school museum station harbour market bakery church castle "
    "farm hotel hospital theatre bridge tower workshop studio stable lighthouse bank park forest cave island".split()
)
ANIMALS = tuple(
    "cat dog horse rabbit parrot turtle goat sheep duck goose owl fox wolf bear tiger lion zebra camel mouse "
    "hamster donkey eagle falcon frog lizard otter panda pigeon seal swan".split()
)
FOODS = tuple(
    "bread cheese apple banana carrot potato tomato onion garlic pepper rice pasta soup salad honey butter sugar "
    "salt coffee tea milk juice lemon cherry grape melon peach pear plum walnut".split()
)
VERBS = tuple(
    "walked looked waited rested worked played danced listened smiled laughed stopped turned moved stayed slept "
    "sang talked dreamed wandered whispered".split()
)
ADVERBS = tuple(
    "slowly quickly quietly happily sadly calmly often rarely again together alone early late today outside".split()
)
TIMES = tuple(
    "in the morning|in the evening|after lunch|before noon|at night|during the storm|in the summer|in the winter|"
    "after the rain|before dinner|at sunrise|at sunset|on the weekend|for an hour|all day".split("|")
)
PEOPLE = tuple(
    "farmer teacher baker doctor sailor painter driver writer singer nurse pilot miner judge clerk guard king "
    "queen child neighbour stranger traveller gardener student captain carpenter".split()
)
DAYS = tuple("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())
LANGUAGES = tuple("French Spanish German Italian Dutch Greek Polish Swedish Japanese Korean Turkish Arabic".split())
TOPICS = tuple("sports science music history travel health cooking politics nature space art business".split())

SPELLING = tuple(
    sorted(
        {
            word.lower()
            for words in (NAMES, CITIES, COLOURS, NOUNS, ADJECTIVES, PLACES, ANIMALS, FOODS, VERBS, PEOPLE, TOPICS)
            for word in words
            if 3 <= len(word) <= 8
        }
    )
)
"""Words that string problems spell: every listed word of 3 to 8 letters, lower case."""
