"""The tools that tool problems offer: schemas, ways of asking, results and answers. Pure data and samplers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from models.nano.data import words

Sampler = Callable[[random.Random], Any]


def one_of(values: tuple[str, ...]) -> Sampler:
    return lambda rng: rng.choice(values)


def number(low: int, high: int) -> Sampler:
    return lambda rng: rng.randint(low, high)


def thing(rng: random.Random) -> str:
    return f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.NOUNS)}"


def flag(rng: random.Random) -> bool:
    return rng.random() < 0.5


CITY, NAME, PLACE = one_of(words.CITIES), one_of(words.NAMES), one_of(words.PLACES)
FOOD, DAY, LANGUAGE = one_of(words.FOODS), one_of(words.DAYS), one_of(words.LANGUAGES)
NOUN, TOPIC, COLOUR = one_of(words.NOUNS), one_of(words.TOPICS), one_of(words.COLOURS)
SKY = one_of(("sunny", "cloudy", "rainy", "windy", "foggy", "clear"))


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument: the names it may carry, its JSON type and its values."""

    names: tuple[str, ...]
    kind: str
    sample: Sampler


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool in all its variants. Forms and `answer` call parameters {0}, {1}, ...; `answer` calls results by name."""

    names: tuple[str, ...]
    description: str
    parameters: tuple[Parameter, ...]
    forms: tuple[str, ...]
    result: tuple[tuple[str, Sampler], ...] = ()
    answer: str = ""


def p(names: str, kind: str, sample: Sampler) -> Parameter:
    return Parameter(tuple(names.split()), kind, sample)


CATALOGUE: tuple[Tool, ...] = (
    Tool(
        ("get_weather", "weather"),
        "Get the current weather of a city.",
        (p("city location", "string", CITY),),
        ("What is the weather in {0}?", "How is the weather in {0} now?", "Tell me the weather for {0}."),
        (("temperature", number(-9, 39)), ("sky", SKY)),
        "It is {temperature} degrees and {sky} in {0}.",
    ),
    Tool(
        ("get_time", "clock"),
        "Get the local time of a city.",
        (p("city place", "string", CITY),),
        ("What time is it in {0}?", "Tell me the time in {0}.", "What is the local time in {0}?"),
        (("hour", number(0, 23)), ("minute", number(10, 59))),
        "It is {hour}:{minute} in {0}.",
    ),
    Tool(
        ("convert_currency", "exchange"),
        "Convert an amount of money.",
        (
            p("amount value", "integer", number(1, 999)),
            p("source from_currency", "string", one_of(("USD", "EUR", "GBP", "JPY"))),
            p("target to_currency", "string", one_of(("CHF", "SEK", "INR", "BRL"))),
        ),
        ("Convert {0} {1} to {2}.", "How much is {0} {1} in {2}?", "Change {0} {1} into {2}."),
        (("result", number(1, 9999)),),
        "{0} {1} is {result} {2}.",
    ),
    Tool(
        ("send_message", "message"),
        "Send a message to a person.",
        (p("recipient to", "string", NAME), p("text body", "string", lambda rng: f"bring the {thing(rng)}")),
        ('Send "{1}" to {0}.', 'Tell {0}: "{1}".', 'Write a message to {0} that says "{1}".'),
        (("id", number(100, 999)),),
        "I sent your message to {0}.",
    ),
    Tool(
        ("set_alarm", "alarm"),
        "Set an alarm.",
        (p("hour hours", "integer", number(0, 23)), p("minute minutes", "integer", number(10, 59))),
        ("Set an alarm for {0}:{1}.", "Wake me at {0}:{1}.", "I need an alarm at {0}:{1}."),
        (("label", NOUN),),
        "Your alarm is set for {0}:{1}.",
    ),
    Tool(
        ("set_timer", "countdown"),
        "Start a countdown timer.",
        (p("minutes duration", "integer", number(1, 90)),),
        ("Set a timer for {0} minutes.", "Start a {0} minute timer.", "Count down {0} minutes."),
        (("timer", number(1, 9)),),
        "Timer {timer} runs for {0} minutes.",
    ),
    Tool(
        ("search_flights", "find_flights"),
        "Search flights between two cities.",
        (p("origin start", "string", CITY), p("destination goal", "string", CITY), p("day date", "string", DAY)),
        ("Find flights from {0} to {1} on {2}.", "I want to fly from {0} to {1} on {2}.", "Flights {0} to {1}, {2}?"),
        (("flights", number(2, 30)), ("price", number(40, 900))),
        "There are {flights} flights from {0} to {1}, from {price} euros.",
    ),
    Tool(
        ("translate", "translate_text"),
        "Translate a word into a language.",
        (p("word text", "string", NOUN), p("language target", "string", LANGUAGE)),
        ('Translate "{0}" into {1}.', 'How do you say "{0}" in {1}?', 'What is "{0}" in {1}?'),
    ),
    Tool(
        ("set_light", "switch_light"),
        "Switch the light of a room.",
        (p("room place", "string", PLACE), p("on active", "boolean", flag)),
        ("Switch the light in the {0} {1}.", "Turn the {0} light {1}.", "Light {1} in the {0}, please."),
        (("watts", number(3, 60)),),
        "The light in the {0} is {1} and uses {watts} watts.",
    ),
    Tool(
        ("book_table", "reserve_table"),
        "Reserve a table in a restaurant.",
        (
            p("people guests", "integer", number(1, 12)),
            p("day date", "string", DAY),
            p("hour time", "integer", number(11, 22)),
        ),
        (
            "Book a table for {0} on {1} at {2}.",
            "Reserve a table for {0} people, {1} at {2}.",
            "Table for {0}, {1}, {2} o'clock.",
        ),
        (("table", number(1, 40)),),
        "Table {table} is booked for {0} on {1} at {2}.",
    ),
    Tool(
        ("add_item", "shopping_add"),
        "Add an item to the shopping list.",
        (p("item product", "string", FOOD), p("quantity count", "integer", number(1, 20))),
        ("Add {1} {0} to my shopping list.", "Put {1} {0} on the shopping list.", "I need to buy {1} {0}."),
        (("items", number(1, 30)),),
        "Your list now has {items} items.",
    ),
    Tool(
        ("find_recipe", "recipe_search"),
        "Find a recipe with an ingredient.",
        (p("ingredient food", "string", FOOD),),
        ("Find a recipe with {0}.", "What can I cook with {0}?", "Show me a {0} recipe."),
        (("title", lambda rng: f"{rng.choice(words.FOODS)} soup"), ("minutes", number(10, 90))),
        "Try {title}, it takes {minutes} minutes.",
    ),
    Tool(
        ("get_news", "news"),
        "Get news about a topic.",
        (p("topic subject", "string", TOPIC), p("count limit", "integer", number(1, 10))),
        ("Show me {1} news about {0}.", "Get {1} {0} headlines.", "I want {1} stories about {0}."),
    ),
    Tool(
        ("lock_door", "door_lock"),
        "Lock the door of a room.",
        (p("door room", "string", PLACE),),
        ("Lock the {0} door.", "Please lock the door of the {0}.", "Close and lock the {0}."),
        (("battery", number(5, 99)),),
        "The {0} door is locked, battery at {battery} percent.",
    ),
    Tool(
        ("set_thermostat", "heating"),
        "Set the temperature of a room.",
        (p("room place", "string", PLACE), p("degrees temperature", "integer", number(12, 28))),
        ("Heat the {0} to {1} degrees.", "Set the {0} to {1} degrees.", "Make it {1} degrees in the {0}."),
        (("current", number(8, 30)),),
        "The {0} is at {current} degrees and goes to {1}.",
    ),
    Tool(
        ("create_event", "calendar_add"),
        "Add an event to the calendar.",
        (
            p("title name", "string", lambda rng: f"{rng.choice(words.TOPICS)} meeting"),
            p("day date", "string", DAY),
            p("hour time", "integer", number(7, 21)),
        ),
        (
            'Add "{0}" to my calendar on {1} at {2}.',
            'Create the event "{0}", {1} at {2}.',
            'Plan "{0}" for {1} at {2}.',
        ),
        (("conflicts", number(0, 4)),),
        "{0} is planned for {1} at {2} with {conflicts} conflicts.",
    ),
    Tool(
        ("get_distance", "distance"),
        "Get the distance between two cities.",
        (p("start origin", "string", CITY), p("end destination", "string", CITY)),
        ("How far is it from {0} to {1}?", "What is the distance between {0} and {1}?", "Distance from {0} to {1}?"),
        (("kilometres", number(20, 9000)),),
        "It is {kilometres} kilometres from {0} to {1}.",
    ),
    Tool(
        ("order_pizza", "pizza"),
        "Order pizzas.",
        (
            p("size format", "string", one_of(("small", "medium", "large"))),
            p("topping extra", "string", FOOD),
            p("quantity number", "integer", number(1, 9)),
        ),
        ("Order {2} {0} pizzas with {1}.", "I want {2} {0} {1} pizzas.", "Get me {2} {0} pizzas, topping {1}."),
        (("minutes", number(15, 90)),),
        "{2} {0} pizzas with {1} arrive in {minutes} minutes.",
    ),
    Tool(
        ("paint", "paint_object"),
        "Paint an object in a colour.",
        (p("thing object", "string", NOUN), p("colour paint", "string", COLOUR)),
        ("Paint the {0} {1}.", "Make the {0} {1}.", "I want the {0} in {1}."),
    ),
    Tool(
        ("find_contact", "contacts"),
        "Look up the phone number of a person.",
        (p("name person", "string", NAME),),
        ("What is the phone number of {0}?", "How can I call {0}?", "Find the number of {0}."),
        (("phone", lambda rng: f"555-{rng.randint(1000, 9999)}"),),
        "The number of {0} is {phone}.",
    ),
    Tool(
        ("get_stock", "stock_level"),
        "Count the pieces of a product in the warehouse.",
        (p("product item", "string", NOUN),),
        ("How many {0} pieces are in stock?", "Check the stock of {0}.", "Is the {0} in stock?"),
        (("pieces", number(0, 500)),),
        "There are {pieces} pieces of {0} in stock.",
    ),
    Tool(
        ("move_robot", "robot_go"),
        "Send the robot to a room.",
        (p("room target", "string", PLACE), p("speed pace", "integer", number(1, 9))),
        (
            "Send the robot to the {0} at speed {1}.",
            "Robot, go to the {0} with speed {1}.",
            "Move the robot into the {0}, speed {1}.",
        ),
        (("seconds", number(3, 300)),),
        "The robot reaches the {0} in {seconds} seconds.",
    ),
)
