# ruff: noqa: E501 (one template a line, however long)
"""The tables behind the generated prompts: words, templates, drafts to rewrite, passages.

Slots are explained at `prompts._fill`. All text is made up here; names of people and places are
ordinary ones and mean nobody in particular.
"""


def _list(text: str) -> list[str]:
    return [entry.strip() for entry in " ".join(text.split()).split("|")]


def _beats(text: str) -> list[list[str]]:
    beats = text.strip().split("\n\n")
    return [[line.strip() for line in beat.splitlines()] for beat in beats]


WORDS: dict[str, list[str]] = {
    "name": _list("""
        Amara | Ben | Carla | Dmitri | Elena | Farid | Grace | Hiro | Ines | Jonas | Kavya | Liam
        | Mei | Nadia | Omar | Priya | Quentin | Rosa | Samir | Tara | Umar | Vera | Wendy |
        Xavier | Yusuf | Zoe | Adele | Bruno | Chloe | David | Esther | Felix | Gita | Hannah |
        Ivan | Julia | Karl | Lena | Marco | Noah | Olga | Pedro | Ruth | Stefan | Theo | Ursula |
        Victor | Wanda | Anna | Boris | Clara | Daniel | Emma | Fatima | George | Helen | Isaac |
        Jada | Kenji | Laura | Miguel | Nina | Oscar | Paula | Ravi | Sara | Tom | Uma | Vikram |
        Yara
    """),
    "surname": _list("""
        Okafor | Lindgren | Moreau | Tanaka | Novak | Silva | Haddad | Brennan | Kowalski | Mensah
        | Petrov | Castillo | Fischer | Nguyen | Rossi | Sharma | Olsen | Duarte | Keller | Abbott
        | Hughes | Marin | Yilmaz | Park | Jensen | Ortega | Walsh | Bauer | Costa | Iversen |
        Doyle | Reyes | Laurent | Banerjee | Schmidt | Adeyemi | Larsen | Romano | Clarke | Vargas
    """),
    "town": _list("""
        Alderbrook | Birchfield | Carrick Bay | Dunmore | Eastwick | Fairhaven | Glenrock | Harrow
        Hill | Ironbridge | Juniper Falls | Kingsport | Larkspur | Millbrook | Northgate |
        Oakridge | Pinehurst | Queensferry | Redwater | Stonebridge | Thornbury | Upper Vale |
        Vernon | Westmere | Yarrow | Zell | Ashford | Bramley | Copperton | Deerfield | Elmswood |
        Foxhollow | Greystone | Highmoor | Larchmont | Marlow | Norwood | Old Mill | Rockport |
        Saltmarsh | Tidewater | Winslow | Brookside | Cedar Point | Maple Ridge | Silver Lake
    """),
    "month": _list("""
        January | February | March | April | May | June | July | August | September | October |
        November | December
    """),
    "weekday": _list("Monday | Tuesday | Wednesday | Thursday | Friday | Saturday | Sunday"),
    "date": _list("{month} {2-28}"),
    "color": _list("""
        red | blue | green | yellow | orange | purple | silver | white | black | gold | brown |
        turquoise | grey | pink | crimson
    """),
    "animal": _list("""
        a fox | an owl | a tortoise | a dolphin | a crow | a hedgehog | a bear | a sparrow | an
        octopus | a beaver | a cat | a goat | an elephant | a frog | a bee | a whale | a squirrel
        | a wolf | a penguin | a horse | a spider | a parrot | a mouse | a rabbit | an otter | a
        lion | a snail | a bat | a camel | a duck
    """),
    "setting": _list("""
        a lighthouse | a night train | a village market | a space station | a small bakery | an
        old library | a mountain hut | a fishing harbor | a desert town | a school attic | a
        greenhouse | a repair shop | a ferry | an island | a snowy forest | a hotel lobby | a
        castle kitchen | a subway car | a museum after closing | a farm in spring | a hospital | a
        theater | a rooftop garden | a ghost town | an airport at midnight | a coal mine | a
        flooded street | a music shop | a bus stop in the rain | a research ship
    """),
    "topic": _list("""
        learning to cook | the first day of school | city parks | remote work | public libraries |
        the value of sleep | ocean pollution | electric cars | reading aloud to children | keeping
        a diary | volunteering | the change of seasons | street music | local farming | saving
        money | the history of bread | walking to work | board games | old photographs | solar
        power | the smell of rain | friendship | growing older | learning a language | fear of
        failure | team sports | recycling at home | night skies | family recipes | train travel |
        being on time | handwriting | houseplants | moving to a new city | weather forecasts |
        small businesses | video games | bird watching | kindness to strangers | the joy of
        silence | patience | social media | school uniforms | healthy breakfasts | long bus rides
        | working in a team | the internet in daily life | clean water | cycling in cities |
        teaching children to swim | pets and loneliness | coffee breaks | winter holidays | honest
        mistakes | repairing old things | community gardens | space travel | robots at home |
        museums | losing a game | music lessons | tidy desks | letters by mail | curiosity | the
        sea | courage | first jobs | cooking for friends | sharing a room
    """),
    "tone": _list("""
        friendly | serious | humorous | hopeful | calm | enthusiastic | formal | playful |
        nostalgic | mysterious | honest | gentle | dramatic | matter-of-fact | warm
    """),
    "audience": _list("""
        children | teenagers | busy parents | new employees | tourists | retired people |
        beginners | college students | small business owners | teachers | neighbors | people who
        dislike the subject | first-time visitors | sports fans | night-shift workers
    """),
    "product": _list("""
        a water bottle that keeps drinks cold | a folding bicycle | a wooden desk lamp | a solar
        phone charger | a pair of running shoes | a rain jacket | a smart garden sensor | a
        reusable notebook | a quiet vacuum cleaner | a travel backpack | a set of kitchen knives |
        an electric toothbrush | a wool blanket | a children's telescope | a portable speaker | a
        standing desk | a cast iron pan | a bamboo toothbrush | a noise-cancelling headset | a
        camping stove | a bird feeder | a language learning app | a meal planning app | a wall
        calendar | a hand-made soap | a board game for families | a baby carrier | a coffee
        grinder | a dog harness | an alarm clock with a light
    """),
    "event": _list("""
        a birthday party | a neighborhood cleanup | a charity run | a book club meeting | a school
        concert | a farewell lunch | a garden tour | a wedding anniversary | a science fair | an
        office picnic | a movie night | a chess tournament | a bake sale | a housewarming party |
        an art exhibition | a town hall meeting | a graduation dinner | a blood donation day | a
        winter market | a cooking class | a retirement party | a first aid course
    """),
    "job": _list("""
        baker | nurse | carpenter | software developer | bus driver | teacher | librarian |
        florist | electrician | pharmacist | chef | gardener | accountant | pilot | journalist |
        mechanic | dentist | farmer | photographer | firefighter | tailor | translator | plumber |
        architect | veterinarian | waiter | sailor | hairdresser | museum guide | postal worker
    """),
    "excuse": _list("""
        a delayed delivery | a broken elevator | a double booking | a missed call | a late reply |
        a wrong invoice | a noisy renovation | a cancelled class | a lost package | a power outage
        | a mixed-up order | a long queue | a website failure | a billing error | a closed parking
        lot
    """),
    "object": _list("""
        an old key | a broken watch | a red umbrella | a lost letter | a wooden chest | a silver
        coin | a torn map | a music box | a blue kite | a cracked mirror | a brass telescope | a
        wool scarf | a paper boat | a rusty bicycle | a glass marble | a candle | a stuffed bear |
        a violin | a hand-drawn postcard | a pocket knife | a jar of buttons | a train ticket | a
        seashell | a camera without film | a recipe card | a chess piece | a pair of boots | a
        lantern
    """),
    "lesson": _list("""
        sharing | honesty | patience | asking for help | not giving up | listening | being brave |
        planning ahead | saying sorry | working together | being yourself | taking care of nature
        | keeping promises | trying new things | being grateful
    """),
    "length": _list("""
        Keep it under {40-120} words. | Use {3-6} sentences. | Write about {60-150} words. | Make
        it one short paragraph. | Write two short paragraphs. | Keep it brief. | Use simple words.
        | End with a question. | End with a surprise. | Use short sentences. | Start with a
        question. | Include a line of dialogue. | Do not use the word "very". | Mention the color
        {color}. | Set it in {month}. | Mention a person called {name5}. | Set it in {town5}. |
        Give it a title. | Write it for {audience}. | Keep the tone {tone5}.
    """),
    "science": _list("""
        photosynthesis | gravity | evaporation | magnetism | the water cycle | digestion | erosion
        | the greenhouse effect | electricity | friction | evolution | the immune system | tides |
        earthquakes | volcanoes | sound waves | the food chain | fermentation | DNA | cell
        division | density | inertia | static electricity | condensation | pollination |
        hibernation | migration | camouflage | rust | combustion | osmosis | the ozone layer | a
        lunar eclipse | a solar eclipse | black holes | meteor showers | the seasons | lightning |
        rainbows | fog | glaciers | fossils | vaccines | antibiotics | vitamins | metabolism |
        reflexes | memory | muscle growth | sleep | soil formation | ocean currents | wind |
        atmospheric pressure | boiling | freezing | atoms | molecules | acids and bases | crystals
        | lasers | radio waves | infrared light | batteries | electric motors | levers | pulleys |
        buoyancy | lift on an airplane wing | radioactivity | the carbon cycle | symbiosis | food
        preservation | biodiversity | genetic inheritance
    """),
    "invention": _list("""
        the printing press | the telephone | the light bulb | the steam engine | the bicycle | the
        airplane | the computer | the internet | the refrigerator | the compass | the wheel |
        paper | glass | the microscope | the telescope | the camera | the radio | the television |
        the sewing machine | the elevator | the zipper | the thermometer | the clock | concrete |
        the railway | the mobile phone | the washing machine | the vacuum cleaner | the X-ray
        machine | the battery | the pencil | the barcode | the satellite | the windmill
    """),
    "country": _list("""
        France | Japan | Brazil | Egypt | Canada | India | Kenya | Norway | Mexico | Australia |
        Spain | Italy | Germany | China | South Korea | Thailand | Peru | Argentina | Chile |
        Greece | Turkey | Portugal | Ireland | Sweden | Finland | Poland | Morocco | South Africa
        | Vietnam | Indonesia | New Zealand | Iceland | Austria | Switzerland | Cuba | Colombia |
        Nigeria | Ghana | Nepal | the Netherlands | Belgium | Denmark | Hungary | the Philippines
        | Malaysia
    """),
    "aspect": _list("""
        its capital city | its climate | its most famous dish | its largest river | its
        traditional music | its national holidays | its main exports | its official language | its
        wildlife | its highest mountain | its currency | its best known landmark | a popular sport
        there | a typical breakfast there | its neighboring countries
    """),
    "pair": _list("""
        a lake and a river | a virus and a bacterium | weather and climate | a comet and an
        asteroid | a fruit and a vegetable | a simile and a metaphor | a moth and a butterfly | a
        loan and a grant | jam and jelly | a crocodile and an alligator | heat and temperature |
        speed and velocity | mass and weight | a debit card and a credit card | a city and a town
        | an ape and a monkey | a novel and a short story | a democracy and a monarchy | a plant
        cell and an animal cell | stocks and bonds | a frog and a toad | hardware and software |
        baking and roasting | a solid and a liquid | a planet and a star | a violin and a viola |
        tea and coffee | a hurricane and a tornado | renewable and fossil energy | a glacier and
        an iceberg | empathy and sympathy | a recipe and a menu | a mean and a median | income and
        profit | a password and a passphrase | a bug and an insect | a road and a street | butter
        and margarine | a college and a university | an artery and a vein
    """),
    "skill": _list("""
        boil an egg | change a bicycle tire | plant tomatoes | write a thank-you note | iron a
        shirt | remember names | start a fire safely | clean a window | sharpen a knife | pack a
        suitcase | make a budget | prepare for a job interview | fold a paper airplane | bake
        bread | learn to juggle | tie a tie | read a map | grow basil indoors | study for an exam
        | give a short speech | brew good coffee | cook rice | organize a bookshelf | train a
        puppy | fall asleep faster | save water at home | remove a stain | learn to swim | take
        better photos | start running | write a resume | choose a melon | paint a room | play
        chess | sew on a button | keep a plant alive | meditate | make pancakes | plan a picnic |
        fix a leaking tap | apologize sincerely | learn ten new words a day | clean a keyboard |
        build a birdhouse
    """),
    "style": _list("""
        Answer in {1-4} sentences. | Answer briefly. | Give an example. | Explain it to a
        {7-14}-year-old. | Use a simple comparison. | Give {2-5} key points. | Keep it under
        {40-100} words. | Answer as a short list. | Explain why it matters. | Give one everyday
        example. | Avoid technical terms. | Answer in plain English. | Start with a one-sentence
        summary. | Mention a common mistake. | Finish with a fun fact. | Explain it for
        {audience}. | Imagine you are talking to a {job}. | Answer step by step. | Explain it the
        way a {job2} would. | My friend {name} asked me this. | I need this for a talk in {town}.
        | I have only {2-9} minutes to read the answer.
    """),
    "fruit": _list("""
        apples | oranges | pears | plums | peaches | mangoes | lemons | bananas | kiwis | figs |
        limes | apricots
    """),
    "item": _list("""
        pencils | notebooks | stickers | marbles | stamps | candles | buttons | postcards |
        balloons | magnets | beads | shells | badges | tennis balls | toy cars | bookmarks | coins
        | trading cards | erasers | ribbons
    """),
    "container": _list("boxes | bags | jars | baskets | crates | drawers | trays | cases"),
    "ware": _list("""
        a bakery | a toy shop | a book stall | a garden center | a cafe | a school store | a
        market stand | a hardware store | a gift shop | a flower shop
    """),
    "show": _list("""
        Show your steps. | Explain your reasoning. | Think step by step. | Give the final number
        at the end. | Write the calculation, then the answer. | Check your answer. | Solve it step
        by step. | What is the answer?
    """),
    "language": _list("Python | JavaScript | Java | C | C++ | Go | Rust | Ruby | TypeScript | PHP"),
    "function": _list("""
        returns the sum of all even numbers in a list | reverses a string | checks whether a word
        is a palindrome | counts the vowels in a string | returns the {2-9} largest values in a
        list | removes duplicates from a list | computes the factorial of a number | returns the
        n-th Fibonacci number | checks whether a number is prime | finds the longest word in a
        sentence | converts {conversion} | counts how often each word appears in a text | merges
        two sorted lists | rotates a list by {2-9} positions | flattens a nested list | returns
        the average of a list of numbers | finds the median of a list | checks whether two words
        are anagrams | capitalizes every word in a sentence | returns the common elements of two
        lists | splits a list into chunks of size {2-9} | sums the digits of a number | converts a
        number to binary | finds the missing number in 1 to n | validates that a password has at
        least {6-16} characters and a digit | groups words by their first letter | sorts words by
        length | computes the greatest common divisor of two numbers | multiplies two matrices |
        returns the index of the first negative number | counts the lines in a file | removes all
        punctuation from a string | checks whether brackets are balanced | generates the first
        {5-30} multiples of {3-12} | finds the second smallest number in a list | replaces every
        space with an underscore | checks whether a year is a leap year | returns all pairs of
        numbers that add up to {10-99} | encodes text with a shift of {2-20} | computes the
        distance between two points | counts words longer than {3-9} letters | returns the most
        common letter in a word | transposes a table of numbers | turns a list of names into one
        comma-separated string | computes the total price with {5-25} percent tax
    """),
    "demand": _list("""
        Add a short docstring. | Include one example call. | Explain how it works. | Handle empty
        input. | Add comments. | Do not use any library. | Add {2-4} test cases. | Keep it under
        {8-20} lines. | Use a loop. | Use recursion if it helps. | Name it {verb}_{noun}. |
        Explain its running time. | Use clear variable names. | Show the expected output. | Add
        type annotations where the language has them. | Raise an error for bad input. | Show two
        different ways. | Name the main variable {noun}. | Write it for beginners.
    """),
    "verb": _list("""
        get | make | find | build | compute | process | handle | select | load | parse | convert |
        update
    """),
    "noun": _list("""
        items | result | values | total | record | order | user | price | score | report | word |
        path | table | entry | message | count
    """),
    "table": _list("""
        customers | orders | products | employees | students | books | flights | invoices |
        recipes | songs | visitors | payments | tickets | members | cars
    """),
    "column": _list("""
        price | age | city | score | quantity | year | rating | country | salary | weight
    """),
    "structure": _list("""
        a stack | a queue | a linked list | a binary search tree | a hash map | a bank account | a
        shopping cart | a playlist | a to-do list | a library catalog | a temperature log | a deck
        of cards | a student record | a timer | a phone book | a parking lot | a vending machine |
        a simple cache | a counter | a rectangle
    """),
    "concept": _list("""
        a variable | a loop | recursion | a dictionary | a class | inheritance | an exception | a
        list comprehension | a pointer | a hash table | sorting | binary search | unit testing |
        version control | a database index | an API | a compiler | garbage collection | a thread |
        a closure | an interface | a regular expression | an array | a boolean | a function
        argument | a return value | a module | debugging | caching | a queue
    """),
    "program": _list("""
        a number guessing game | a dice roller | a countdown timer | a tip calculator | a
        rock-paper-scissors game | a unit converter | a simple quiz | a word counter | a password
        generator | a multiplication table | a shopping list | a coin flip simulator | a
        temperature converter | a mortgage calculator | a text menu | a Hangman game | a calendar
        printer | a grade calculator | a birthday reminder | a bill splitter
    """),
    "manner": _list("""
        more formally | in a friendlier tone | in simpler English | in one sentence | as a bullet
        list | for a {8-13}-year-old | in the past tense | in the third person | more politely |
        more confidently | in half as many words | as a short poem | as a headline | as a tweet |
        with more vivid detail | in a neutral tone | as a text message | as a polite question | in
        the style of a news report | in the style of a fairy tale | as a dialogue | in a more
        cheerful way | in plain language, without idioms | as if written by a {job5} | as an
        announcement for {audience5} | in exactly {2-4} sentences | in fewer than {15-40} words |
        as instructions | in a {tone5} tone | as a diary entry
    """),
    "conversion": _list("""
        kilometers to miles | miles to kilometers | meters to feet | Celsius to Fahrenheit |
        Fahrenheit to Celsius | kilograms to pounds | hours to seconds | liters to gallons | days
        to hours | minutes to seconds | inches to centimeters | grams to ounces | bytes to
        megabytes | degrees to radians
    """),
}

TEMPLATES: dict[str, list[str]] = {
    "writing": [
        "Write a short story about {animal} and {animal2} who meet in {setting}. {length}",
        "Write a {tone} story that begins in {setting} and involves {object}. {length}",
        "Write a {tone} paragraph about {topic}. {length}",
        "Write a poem about {topic} in a {tone} tone. {length}",
        "Write a four-line poem about {object} in {setting}. {length}",
        "Write a {tone} blog post introduction about {topic} for {audience}. {length}",
        "Describe {setting} at {3-11} in the morning in a {tone} way. {length}",
        "Write a {tone} product description for {product}. {length}",
        "Write an advertisement for {product}, aimed at {audience}. {length}",
        "Write an invitation to {event} on {weekday}, {date}, in {town}. {length}",
        "Write a {tone} email to {name} about {event} in {town}. {length}",
        "Write a letter of apology from a {job} to {name} for {excuse}. {length}",
        "Write a thank-you note to {name}, who helped with {event}. {length}",
        "Write a {tone} speech of about {60-150} words on {topic} for {audience}.",
        "Write a fable about {animal} that teaches {lesson}. {length}",
        "Write a dialogue between a {job} and a {job2} about {topic}. {length}",
        "Write a diary entry of a {job} who found {object} in {setting}. {length}",
        "Write a job advertisement for a {job} in {town}. {length}",
        "Give {3-8} creative titles for an article about {topic} for {audience}.",
        "Suggest {3-7} names for {ware} in {town} run by a former {job}. Explain each in a few words.",
        "Write a {tone} review of {product} by a {job}. {length}",
        "Continue this story: {name} opened the door and saw {object} on the floor. {length}",
        "Continue this story: On {date}, {animal} walked into {setting} carrying {object}. {length}",
        "Write the opening scene of a play set in {setting}, with a {job} and {animal}. {length}",
        "Argue for or against this statement: {topic} should be discussed more. {length}",
        "List {3-6} arguments in favor of {topic} and explain the strongest one to {audience}.",
        "Write a social media post about {event} in {town} on {weekday}. {length}",
        "Write {2-5} slogans for {product}. Keep them {tone}.",
        "Write a bedtime story for {name} about {animal} and {object}. {length}",
        "Write a short news article about {event} held in {town} on {date}. {length}",
        "Write a {tone} welcome message for {audience} who join {event}. {length}",
        "Describe a day in the life of a {job} in {town}. {length}",
        "Invent a legend that explains why {animal} lives near {setting}. {length}",
        "Write a conversation in which {name} asks {name2} for advice on {topic}. {length}",
        "Write a riddle whose answer is {object}, then give the answer. {length}",
    ],
    "qa": [
        "Explain {science}. {style}",
        "What is the idea behind {science}? {style}",
        "Why does it help to know about {science}? {style}",
        "How would you describe {science} to {audience}? {style}",
        "Can you explain {science} and how it relates to {science2}? {style}",
        "What are {2-5} common misunderstandings about {science}? {style}",
        "Where can we observe {science} in daily life? {style}",
        "What is the difference between {pair}? {style}",
        "How would you explain the difference between {pair} to {audience}? {style}",
        "How did {invention} change everyday life? {style}",
        "Why was {invention} an important invention? {style}",
        "Which mattered more, {invention} or {invention2}? {style}",
        "What came before {invention}? {style}",
        "Tell me about {country}, especially {aspect}. {style}",
        "What should a visitor know about {country}? {style}",
        "Compare {country} and {country2} with regard to climate and food. {style}",
        "I am a {job} and will travel to {country} in {month}. What should I pack? {style}",
        "How do I {skill}? {style}",
        "What do I need in order to {skill}? {style}",
        "What are {3-6} tips to {skill}? {style}",
        "What are common mistakes when people try to {skill}? {style}",
        "What does a {job} do? {style}",
        "What skills does a {job} need? {style}",
        "What questions should I ask a {job} about the work? {style}",
        "How is the work of a {job} different from that of a {job2}? {style}",
        "How does {animal} survive in winter? {style}",
        "What does {animal} eat, and where does it live? {style}",
        "Give me {3-7} interesting facts about {science}. {style}",
        "Give me {3-7} facts about {country} that {audience} may not know.",
        "What are the advantages and disadvantages of {topic}? {style}",
        "Why do people care about {topic}? {style}",
        "Make a quiz of {3-5} questions with answers about {science}. {style}",
        "What can you tell me about {science}? {style}",
        "What would happen without {invention}? {style}",
        "Give a {2-7}-day plan to learn how to {skill}. {style}",
    ],
    "arithmetic": [
        "a=3-60 b=3-60 {name} has {a} {item} and buys {b} more. How many {item} does {name} have now? {show}",
        "a=40-99 b=3-38 {name} had {a} {item} and gave {b} of them to {name2}. How many are left? {show}",
        "a=3-12 b=4-25 There are {a} {container} with {b} {item} in each. How many {item} are there in total? {show}",
        "a=3-12 b=4-25 {name} shares {a*b} {item} equally among {a} friends. How many does each friend get? {show}",
        "a=2-9 b=2-15 c=3-20 {name} buys {a} notebooks at ${b} each and a bag for ${c}. How much does {name} spend? {show}",
        "a=2-9 b=2-12 c=1-9 d=110-150 {name} has ${d} and buys {a} tickets at ${b} each and a map for ${c}. How much money is left? {show}",
        "a=2-8 b=40-95/5 A train travels at {b} kilometers per hour for {a} hours. How far does it go? {show}",
        "a=2-8 b=40-95/5 A bus covers {a*b} kilometers in {a} hours at a steady speed. What is its speed? {show}",
        "a=3-20 b=3-20 A garden in {town} is {a} meters long and {b} meters wide. What are its area and its perimeter? {show}",
        "a=2-9 b=100-900/100 {Ware} sold {item} worth ${b} on each of {a} days. What were the total sales? {show}",
        "a=10-60/10 b=100-900/100 A coat costs ${b} and is on sale for {a} percent off. What is the sale price? {show}",
        "a=5-25/5 b=20-200/20 A meal costs ${b} and {name} adds a tip of {a} percent. How much does {name} pay? {show}",
        "a=12-40 b=2-5 {name} is {a} years old and {name2} is {b} years older. What is the sum of their ages? {show}",
        "a=3-12 b=2-4 {name} read {a} pages on {weekday} and {b} times as many on {weekday2}. How many pages did {name} read on both days? {show}",
        "a=2-9 b=3-15 c=2-20 {Ware} has {a} {container} of {b} {fruit} each and {c} loose {fruit}. How many {fruit} are there? {show}",
        "a=3-9 b=6-30 c=1-5 {name} has {a} {container} of {b} {item}. In each of them {c} {item} are broken. How many are not broken? {show}",
        "a=2-6 b=10-45/5 {name} practices piano for {b} minutes on {a} days of the week. How many minutes is that in a week? {show}",
        "a=2-12 b=2-12 c=2-6 A recipe for {a} people needs {a*b} spoons of sugar. How many spoons are needed for {c} people? {show}",
        "a=4-9 b=12-60 The scores of {name} in three games were {b}, {10-60} and {10-60}. What is the total score? {show}",
        "a=10-50 b=10-50 c=10-50 On three days {name} traveled {a}, {b} and {c} kilometers by bicycle and on foot. How many kilometers is that? {show}",
        "a=3-9 b=20-80 A pool holds {a*b} liters and fills at {a} liters per minute. How many minutes does it take to fill? {show}",
        "a=2-9 b=5-30 c=2-9 {name} earns ${b} per hour and works {a} hours a day. How much does {name} earn in {c} days? {show}",
        "a=120-480/10 b=20-95/5 {name} saves for a bicycle that costs ${a} and already has ${b}. How much more is needed? {show}",
        "a=3-8 b=5-12 c=2-4 There are {a} rows of {b} chairs in a hall in {town}. {c} chairs in each row are empty. How many people are seated? {show}",
        "a=15-60 b=3-9 A farmer in {town} collects {a} eggs each day. How many eggs are collected in {b} days? {show}",
        "a=6-12 b=3-11 Which is more, {a} {container} of {b} {item} or {10-99} loose {item}? {show}",
        "What is {12-99} plus {12-99} minus {2-11}? {show}",
        "What is {3-25} times {3-25}, and what is the result plus {2-90}? {show}",
        "a=2-5 b=4-20 {name} has {b} {fruit}. {name2} has {a} times as many. How many {fruit} do they have together? {show}",
        "a=200-900/50 b=20-90 c=20-90 A library in {town} has {a} books. It lends out {b} books and receives {c} new ones. How many books are there now? {show}",
        "a=7-11 b=1-6 A film starts at {a} in the morning and lasts {b} hours and {10-50} minutes. When does it end? {show}",
        "a=3-15 b=2-9 c=2-9 {name} plants {a} rows with {b} tulips and {c} roses in each row. How many flowers are planted? {show}",
        "a=2-9 b=10-80/10 One ticket for the museum in {town} costs ${b}. A group pays ${a*b}. How many people are in the group? {show}",
        "a=4-20 b=2-9 {name} cuts a rope of {a*b} meters into pieces of {b} meters. How many pieces are there? {show}",
        "a=3-12 b=6-40 {name} thinks of a number and multiplies it by {a}. The result is {a*b}. What is the number? {show}",
    ],
    "code": [
        "Write a {language} function that {function}. {demand}",
        "Write a {language} function that {function}. {demand} {demand2}",
        "Show how to write a function in {language} that {function}, and explain each line. {demand}",
        "How would you test a {language} function that {function}? Write {2-5} tests. {demand}",
        "Explain in words, without code, how a function that {function} works. Then write it in {language}. {demand}",
        "Write a {language} class that represents {structure}. {demand}",
        "Write a {language} class for {structure} with a method called {verb}_{noun}. {demand}",
        "Write a small {language} program: {program}. {demand}",
        "Write {program} in {language}. {demand} {demand2}",
        "Write a SQL query that returns all {table} with a {column} above {5-500}, sorted by {column2}.",
        "Write a SQL query that counts the {table} for each {column}, and keeps only groups of at least {2-50}.",
        "Write a SQL query that returns the {3-20} {table} with the highest {column}. Explain each clause.",
        "Write a SQL statement that creates a table called {table} with the columns {column}, {column2} and {column3}.",
        "Write a regular expression that matches {3-9} digits followed by {2-6} letters, and explain it in {language}.",
        "What is {concept} in {language}? {style}",
        "Explain {concept} to {audience} with a short {language} example. {style}",
        "What is the difference between {concept} and {concept2}? Give an example in {language}.",
        "a=2-9 b=10-40 What does this Python code print?\n\nfor i in range({a}, {b}, {2-7}):\n    print(i * {2-9})\n\n{style}",
        "What does this Python code do?\n\ndef {verb}_{noun}({noun}):\n    return [x * {2-9} for x in {noun} if x > {2-90}]\n\n{style}",
        "What does this Python code return for {verb}_{noun}({5-60})?\n\ndef {verb}_{noun}(n):\n    total = {0-9}\n    for i in range(n):\n        total += i\n    return total\n\n{style}",
        "Find the bug in this Python code and fix it:\n\ndef {verb}_{noun}({noun}):\n    total = {0-9}\n    for x in {noun}:\n    total += x * {2-9}\n    return total",
        "Find the bug in this Python code:\n\n{noun} = [{2-50}, {2-50}, {2-50}]\nfor i in range(len({noun}) + 1):\n    print({noun}[i])\n\n{style}",
        "Rewrite this Python loop as a list comprehension:\n\n{noun} = []\nfor x in range({3-90}):\n    if x % {2-9} == {0-1}:\n        {noun}.append(x + {2-40})",
        "Translate this Python function to {language}:\n\ndef {verb}_{noun}(a, b):\n    if a > b + {2-50}:\n        return a - b\n    return a * {2-9}",
        "Add comments to this code:\n\ndef {verb}_{noun}(text):\n    words = text.split()\n    long_words = [w for w in words if len(w) > {3-12}]\n    return len(long_words) + {0-9}",
        "Write a {language} function called {verb}_{noun} that {function}. {demand}",
        "Write a JSON example for {structure} with {3-6} fields, one of which is called {noun}. {style}",
        "Write an HTML page with a heading about {topic} and a list of {3-6} items.",
        "Write a shell command that finds all files ending in .{noun} larger than {2-90} megabytes, and explain it.",
        "Write a Python script that reads {table}.csv and prints the average {column}. {demand}",
        "Write a Python dictionary of {3-6} {table} with their {column}, then print it sorted by {column}. {demand}",
    ],
    "summarization": [
        "Summarize the following passage in {1-3} sentences.\n\n{passage}",
        "Summarize this text in fewer than {20-50} words:\n\n{passage}",
        "{passage}\n\nSummarize the text above for {audience}.",
        "Read the passage and write a one-sentence summary.\n\n{passage}",
        "Give a headline and a {1-2}-sentence summary of this report.\n\n{passage}",
        "{passage}\n\nWhat are the {2-4} main points of this passage?",
        "Write a short summary of the text below in a {tone} tone.\n\n{passage}",
        "Please condense this passage to its most important facts.\n\n{passage}",
        "List the {3-5} most important facts from this passage as bullet points.\n\n{passage}",
        "TL;DR of the following text, please:\n\n{passage}",
        "Summarize the passage below as a message to {name5}.\n\n{passage}",
        "{passage}\n\nIn your own words, what is this text about? Use at most {1-3} sentences.",
        "Write an abstract of about {25-60} words for this text.\n\n{passage}",
        "A {job5} has no time to read this. Summarize it.\n\n{passage}",
    ],
    "extraction": [
        "Answer the question using the passage.\n\nPassage: {passage}\n\nQuestion: {question}",
        "{passage}\n\n{question}",
        "{passage}\n\n{question} Answer in one sentence.",
        "Use only the context to answer.\n\nContext: {passage}\n\nQuestion: {question}\nAnswer:",
        "Read the text and answer: {question}\n\n{passage}",
        "{question} Quote the sentence that supports your answer.\n\n{passage}",
        "List every number in this passage and say what it refers to.\n\n{passage}",
        "Extract all names of people and places from this text.\n\n{passage}",
        "Extract the people, places and dates from this text as JSON.\n\n{passage}",
        "Make a table of the facts in this passage with the columns fact and value.\n\n{passage}",
        "Write {2-4} questions that this passage answers, with their answers.\n\n{passage}",
        "Who is mentioned in this text, and what did they do?\n\n{passage}",
        "Extract the key facts as a list of short phrases.\n\n{passage}",
        "{passage}\n\nBased on the text above: {question} Explain how you know.",
        "Pull out the dates and amounts from the text below.\n\n{passage}",
    ],
    "retrieval": [
        "Answer the question from the sources and name the source.\n\n[1] {source1}\n\n[2] {source2}\n\nQuestion: {question}",
        "Context:\n- {source1}\n- {source2}\n\nUsing only the context, answer: {question}",
        "Document A: {source1}\n\nDocument B: {source2}\n\n{question} Which document says so?",
        "You are given search results.\n\nResult 1: {source1}\n\nResult 2: {source2}\n\nUser question: {question}\nGive a short answer.",
        "{source1}\n\n{source2}\n\nQuestion about the two texts: {question}",
    ],
    "rewriting": [
        "Rewrite this {kind} {manner}:\n\n{draft}",
        "Rewrite the following {kind} {manner}.\n\n{draft}",
        "Here is a {kind}:\n\n{draft}\n\nPlease rewrite it {manner}.",
        "Please rephrase this {kind} {manner}: {draft}",
        "Could you rephrase this {kind} {manner}?\n\n{draft}",
        "Express this {kind} {manner}, and keep all facts.\n\n{draft}",
        "Improve this {kind} by rewriting it {manner}:\n\n{draft}",
        "Correct the grammar and spelling of this {kind}, then write it {manner}.\n\n{draft}",
        "Give {2-3} versions of this {kind}, each written {manner}.\n\n{draft}",
        "{draft}\n\nRewrite the {kind} above {manner}.",
    ],
}

# Texts to rewrite, by what they are called in the request.
DRAFTS: dict[str, list[str]] = {
    "email": [
        "hi {name}, the order of {2-90} {item} did not arrive on {weekday}. i need them by {date}. tell me what happened",
        "Dear {name}, I can not come to {event} on {date} because I must work in {town}. Sorry. {name2}",
        "{name}, you forgot to send the report again. The team in {town} waited {2-9} hours for it. Send it today.",
        "Hello, I bought {product} on {date} and it stopped working after {2-20} days. I want my money back. {name} {surname}",
        "Hey {name}! Can you bring {2-30} {item} to {event}? We start at {1-6} pm in {town}. Thanks a lot!",
        "Dear Ms. {surname}, we regret to tell you that the position of {job} has been filled. We had {20-400} applications.",
        "Hi all, the meeting moves from {weekday} to {weekday2} at {8-11} am. {name} will explain the plan for {town}.",
        "{name}, the invoice over ${100-990} is still open. We sent it on {date}. Pay it this week.",
    ],
    "note": [
        "{name} called at {1-11} pm about {object}. Wants you to call back before {weekday}.",
        "Out of {fruit} and {fruit2}. Need {2-12} of each for {event}. Ask {name}.",
        "The key to the office in {town} is with {name}. The alarm code changes on {date}.",
        "Gone to {town} with {name}. Back at {3-9}. Please feed the cat and water the plants.",
        "Package for {name} came. It has {2-40} {item} in it. Left it next to the {color} door.",
    ],
    "sentence": [
        "The {job} in {town} gave {name} {object} because {name2} had lost it on {weekday}.",
        "Because of {excuse}, {name} waited {10-90} minutes in {setting} and missed {event}.",
        "It is the opinion of {name} that more thought should be given to {topic} by people in {town}.",
        "Me and {name} was going to {event} in {town} but there was {excuse} so we was late.",
        "A total of {20-900} people attended {event}, which was organized by {name} {surname} in {town}.",
        "{name} dont like {topic} but {name2} think it are the best thing in {town}.",
        "There were {2-30} {item} in the {color} box that {name} found in {setting}.",
        "{Topic} was discussed by {name} and {name2} for {2-9} hours on {weekday}.",
    ],
    "review": [
        "I bought {product} for ${10-190}. It is ok but the {color} paint came off after {2-20} days. Not happy.",
        "Best purchase ever! {name} and I use {product} every {weekday}. We told {2-9} friends about it.",
        "The cafe in {town} was too loud and the soup was cold. {name}, the waiter, was nice. {2-4} stars.",
        "We stayed {2-9} nights in a hotel in {town}. The room was small, but breakfast with {fruit} was great.",
        "{Product}: good price, bad manual. It took me {2-9} hours to understand it. My friend {name} gave up.",
    ],
    "paragraph": [
        "{name} works as a {job} in {town}. Every {weekday} {name} thinks about {topic}. Last {month} {name2} joined, and now they talk about it together.",
        "{name} found {object} in {setting}. It had been there for {3-90} years. Nobody knew who had left it. {name} took it to {town}.",
        "Many people like {topic}. Some people do not. In {town}, {name} asked {20-200} neighbors about it. Most of them said it was important.",
        "On {date} there was {event} in {town}. {20-300} people came. It rained at {1-6} pm, but {name} had brought umbrellas.",
        "{name} wanted to {skill}. The first try failed. After {2-9} tries it worked, and {name2} was impressed.",
    ],
    "announcement": [
        "The pool in {town} is closed from {date} for {2-9} weeks because of {excuse}. Ask {name} if you have questions.",
        "{Event} takes place on {weekday} at {1-8} pm. Tickets cost ${3-40}. Children pay half. Come to {town}!",
        "Do not park in front of the school in {town} on {date}. Cars will be towed. {name} {surname}, principal.",
        "We are looking for {2-20} volunteers for {event} in {town}. No experience needed. Write to {name}.",
    ],
}

# One block a kind of passage. A beat is the question that it answers, then ways to say it. The beats
# of a kind share their names and numbers; a number is declared alike wherever it may come first.
PASSAGES: list[list[list[str]]] = [
    _beats("""
        Where is the new library, and when did it open?
        The new public library in {town} opened on {date} after a long period of construction.
        On {date}, the town of {town} celebrated the opening of its new public library.

        How long did the work take, and what did it cost?
        a=2-7 b=2-19 The work took {a} years and cost {b} million dollars, slightly more than planned.
        a=2-7 b=2-19 Builders needed {a} years, and the final bill came to {b} million dollars.

        Who designed the building?
        The architect, {name} {surname}, wanted a bright building with wooden ceilings and wide windows.
        It was designed by {name} {surname}, who is known for quiet rooms and a lot of daylight.

        How many books does the library hold?
        c=20-90 Its shelves hold about {c} thousand books, along with films, maps and board games.
        c=20-90 Visitors can choose from roughly {c} thousand books and a small collection of films.

        What is special about the upper floor?
        The upper floor has a reading room with {color} chairs and a view of the river.
        On the upper floor, a reading room with {color} chairs looks out over the river.

        How many people came on the first day?
        d=200-950/10 On the first day, {d} people walked through the doors before noon.
        d=200-950/10 More people came than expected: {d} visitors were counted on the first day.

        What did the head librarian say?
        Head librarian {name2} {surname2} said that evening courses would begin in {month2}.
        According to head librarian {name2} {surname2}, evening courses will start in {month2}.

        What are the opening hours?
        The library is open until {6-9} in the evening and closed on {weekday}.
        It closes at {6-9} in the evening and stays shut on {weekday}.
    """),
    _beats("""
        Which company reported results, and what does it make?
        {surname} and Sons, a family company in {town} that makes furniture, has published its results.
        The furniture maker {surname} and Sons, based in {town}, reported its yearly results on {weekday}.

        How did sales develop?
        a=3-28 b=12-95 Sales rose by {a} percent to {b} million dollars, helped by orders from abroad.
        a=3-28 b=12-95 The company sold goods worth {b} million dollars, {a} percent more than the year before.

        Why did costs go up?
        Costs also went up, mainly because wood and transport became more expensive in {month}.
        Higher prices for wood and transport since {month} made production more expensive.

        How many new people will be hired?
        c=15-120 The company plans to hire {c} people, most of them carpenters and drivers.
        c=15-120 About {c} new workers, mostly carpenters and drivers, are to be hired.

        Which product sold best?
        The best-selling product was a {color} kitchen table that can be folded flat.
        Customers were most interested in a {color} kitchen table that folds flat.

        Who leads the company, and what is the plan?
        Director {name} {surname} said a second workshop would open in {town2} next year.
        Next year a second workshop will open in {town2}, director {name} {surname} announced.

        What do the workers ask for?
        The workers, represented by {name2} {surname2}, are asking for shorter night shifts.
        A speaker for the workers, {name2} {surname2}, asked for shorter night shifts.

        What share of the wood comes from local forests?
        d=40-95/5 Around {d} percent of the wood comes from forests within a day's drive.
        d=40-95/5 Local forests supply {d} percent of the wood that is used.
    """),
    _beats("""
        What did the researchers study, and where?
        A team led by {name} {surname} has studied how otters live along the river near {town}.
        Near {town}, researchers around {name} {surname} have watched a group of river otters.

        How long did the study last, and how many animals were followed?
        a=2-9 b=12-80 For {a} years they followed {b} animals with small radio transmitters.
        a=2-9 b=12-80 Over {a} years, {b} animals carried small radio transmitters.

        When are the otters most active?
        The otters were most active shortly before sunrise, especially in {month}.
        Most activity was seen just before sunrise, above all in {month}.

        How far does an otter travel in a night?
        c=3-18 In a single night an otter swam up to {c} kilometers in search of food.
        c=3-18 Some animals covered {c} kilometers in one night while they looked for food.

        What do the otters eat?
        d=55-85/5 Fish made up {d} percent of their diet; the rest was crabs, frogs and insects.
        d=55-85/5 About {d} percent of what they ate was fish, followed by crabs and frogs.

        What surprised the team?
        The team was surprised that young animals stayed with their mothers for more than a year.
        To everyone's surprise, the young remained with their mothers for over a year.

        What threatens the otters?
        The main danger is traffic: a road near {town2} cuts through their territory.
        A busy road near {town2} crosses their territory and is the greatest danger.

        What will happen next?
        Next {month2}, volunteers will build a tunnel so that the animals can cross safely.
        Volunteers plan to build a safe crossing under the road in {month2}.
    """),
    _beats("""
        Who was born where and when?
        e=1890-1948 {name} {surname} was born in {town} in {e}, the youngest child of a {job}.
        e=1890-1948 Born in {e} in {town}, {name} {surname} grew up as the child of a {job}.

        What was {name}'s first job?
        At the age of {13-17}, {name} began to work for a clockmaker and learned to repair watches.
        {name} started work at {13-17}, repairing watches in the shop of a clockmaker.

        What did {name} study?
        A scholarship made it possible to study physics in {town2}, where {name} met {name2} {surname2}.
        Thanks to a scholarship, {name} studied physics in {town2} and met {name2} {surname2} there.

        What did {name} invent?
        a=3-9 After {a} years of trials, they built a pocket compass that worked even in a storm.
        a=3-9 It took them {a} years to build a pocket compass that sailors could trust in a storm.

        How many compasses were sold?
        b=2-60 In the first year, {b} thousand pieces were sold, most of them to fishing crews.
        b=2-60 Fishing crews bought most of the {b} thousand pieces that were sold in the first year.

        What did {name} do with the money?
        {name} spent the money on a school for apprentices, which still exists today.
        Much of the money went into a school for apprentices that is still open today.

        What is known about {name}'s private life?
        Friends described {name} as shy, fond of chess, and unable to cook even an egg.
        {name} was said to be shy, loved chess, and never learned to cook.

        How is {name} remembered?
        A small museum in {town} shows the original tools and {12-90} letters.
        The original tools and {12-90} letters can be seen in a small museum in {town}.
    """),
    _beats("""
        Who won the match, and by what score?
        a=3-5 b=0-2 The handball team of {town} beat {town2} by {a} goals to {b} on {weekday} evening.
        a=3-5 b=0-2 On {weekday} evening, {town} won its home match against {town2} by {a} to {b}.

        How many people watched?
        c=300-980/20 A crowd of {c} watched the game in spite of heavy rain.
        c=300-980/20 Despite heavy rain, {c} people had come to watch.

        Who scored first?
        d=4-28 {name} {surname} scored first after {d} minutes with a shot from far out.
        d=4-28 The first goal came from {name} {surname} in minute {d}, from a long distance.

        Why was the second half difficult?
        In the second half the lights failed for {6-20} minutes, and the players had to wait.
        A power failure stopped the second half for {6-20} minutes.

        Who was injured?
        {name2} {surname2} hurt a knee and will miss the next {2-5} games.
        The team will be without {name2} {surname2}, who hurt a knee, for {2-5} games.

        What did the coach say?
        Coach {surname3} praised the defense and said that nobody had panicked.
        The defense had stayed calm, said coach {surname3} after the game.

        Where does the team stand now?
        The team is now in place {2-8} of the league with {14-40} points.
        With {14-40} points, the team has moved up to place {2-8}.

        When is the next match?
        The next match is on {date} against {town3}, the champion of last year.
        On {date}, {town3}, last year's champion, will be the next opponent.
    """),
    _beats("""
        What happened in {town}, and when?
        A strong storm passed over {town} in the night of {date} and left many streets under water.
        In the night of {date}, a storm flooded many streets in {town}.

        How fast was the wind?
        a=80-150/5 Wind speeds of up to {a} kilometers per hour were measured at the harbor.
        a=80-150/5 At the harbor, the wind reached {a} kilometers per hour.

        How much rain fell?
        b=30-95 Within {2-6} hours, {b} millimeters of rain fell, as much as in a normal month.
        b=30-95 As much rain as in a normal month, {b} millimeters, fell in {2-6} hours.

        How many homes lost power?
        c=2-40 About {c} hundred homes were without power until {weekday} morning.
        c=2-40 Power was out in {c} hundred homes and came back only on {weekday} morning.

        What did the fire service do?
        The fire service was called {20-190} times, mostly for fallen trees and flooded cellars.
        Fallen trees and flooded cellars led to {20-190} calls to the fire service.

        Was anyone hurt?
        Nobody was seriously hurt, but {name} {surname}, a {job}, was rescued from a car.
        {name} {surname}, a {job}, had to be rescued from a car; nobody was seriously hurt.

        What did the mayor promise?
        Mayor {name2} {surname2} promised help for families who lost furniture or tools.
        Families who lost furniture or tools will get help, mayor {name2} {surname2} promised.

        When will the school reopen?
        The school in {town2} street stays closed until {date2} because its roof was damaged.
        Because of damage to its roof, the school in {town2} street will reopen on {date2}.
    """),
    _beats("""
        Where did the writer stay, and for how long?
        a=2-9 We spent {a} nights at the {color} House, a small hotel at the edge of {town}.
        a=2-9 Our family stayed for {a} nights in a small hotel in {town} called the {color} House.

        What did a night cost?
        b=60-190/5 A double room cost {b} dollars a night, with breakfast.
        b=60-190/5 We paid {b} dollars a night for a double room, breakfast included.

        How was the room?
        The room on floor {2-6} was clean and quiet, but the bathroom door did not close.
        Our room on floor {2-6} was quiet and clean; only the bathroom door was broken.

        What was served for breakfast?
        Breakfast came with fresh bread, {fruit}, and eggs from a farm in {town2}.
        In the morning there were fresh bread, {fruit}, and eggs from a farm in {town2}.

        Who helped the guests?
        The owner, {name} {surname}, drew us a map with the best paths to the lake.
        {name} {surname}, who owns the hotel, showed us the best paths to the lake on a map.

        How far is the lake?
        c=10-45/5 The lake is a walk of {c} minutes through the forest.
        c=10-45/5 It takes {c} minutes to walk through the forest to the lake.

        What went wrong?
        On {weekday} the heating failed, and we were given extra blankets and hot chocolate.
        The heating failed on {weekday}, but the staff brought blankets and hot chocolate.

        Would the writer come back?
        We would come back in {month}, when the lake is warm enough to swim.
        Next time we would travel in {month}, when one can swim in the lake.
    """),
    _beats("""
        What was presented, and by whom?
        The start-up {surname} Labs has presented a lamp that is charged by turning a handle.
        A lamp that is charged with a handle was presented in {town} by the start-up {surname} Labs.

        How long does the lamp shine?
        a=2-9 One minute of turning gives {a} hours of light.
        a=2-9 After turning the handle for one minute, the lamp shines for {a} hours.

        What does the lamp weigh?
        b=120-480/20 The lamp weighs {b} grams and fits into the pocket of a coat.
        b=120-480/20 With a weight of {b} grams, it fits into a coat pocket.

        Who had the idea?
        The idea came to {name} {surname2}, a former {job}, during a camping trip.
        {name} {surname2}, once a {job}, had the idea on a camping trip.

        What does it cost, and when can it be bought?
        c=15-75/5 It will cost {c} dollars and can be bought from {date}.
        c=15-75/5 From {date} it will be in shops for {c} dollars.

        How was it tested?
        Before the launch, {20-300} hikers tested it in snow, rain and heat.
        It was tested by {20-300} hikers in snow, rain and heat.

        What do critics say?
        Critics say that the handle is too short and that the {color} model looks cheap.
        Some testers found the handle too short and the {color} model cheap looking.

        What is the company's next plan?
        Next, the company wants to build a radio that works in the same way.
        A radio that works in the same way is to follow.
    """),
    _beats("""
        What did the council of {town} decide?
        The council of {town} decided on {weekday} to close the market square to cars.
        Cars will be banned from the market square in {town}, the council decided on {weekday}.

        How did the members vote?
        a=12-20 b=3-11 After a debate of {2-5} hours, {a} members voted in favor and {b} against.
        a=12-20 b=3-11 The vote was {a} to {b} after {2-5} hours of debate.

        When does the rule start?
        The rule starts on {date}; deliveries remain possible before {8-11} in the morning.
        It takes effect on {date}, with deliveries allowed before {8-11} in the morning.

        What will be built on the square?
        c=12-60 The town will plant {c} trees and set up benches and a fountain.
        c=12-60 A fountain, benches and {c} new trees are planned.

        What will it cost?
        d=150-900/50 The work will cost {d} thousand dollars, half of which comes from the state.
        d=150-900/50 Half of the {d} thousand dollars that it costs will be paid by the state.

        Why are shop owners worried?
        {name} {surname}, who runs {ware}, fears that older customers will stay away.
        Older customers may stay away, fears {name} {surname}, who runs {ware}.

        Who supports the plan?
        {name2} {surname2}, a {job}, welcomed the plan because children could play safely.
        Children could finally play safely, said {name2} {surname2}, a {job} who supports the plan.

        When will the plan be reviewed?
        The council will look at the results after {6-24} months.
        After {6-24} months the results are to be reviewed.
    """),
    _beats("""
        Where is the orchard, and who runs it?
        {name} {surname} runs an orchard outside {town} that has been in the family since {1880-1990}.
        The orchard of {name} {surname} lies outside {town} and has been in the family since {1880-1990}.

        How many trees are there?
        a=200-900/20 Around {a} trees stand on the hill, mostly {fruit} and {fruit2}.
        a=200-900/20 On the hill there are about {a} trees with {fruit} and {fruit2}.

        How large was the harvest this year?
        b=8-70 This year's harvest came to {b} tons, the best result since {month} {2001-2019}.
        b=8-70 With {b} tons, the harvest was the best since {2001-2019}.

        Why was the weather a problem?
        A frost in {month2} damaged the blossoms on the lower fields.
        The lower fields suffered from a frost in {month2}.

        How many helpers were needed?
        c=6-48 For the picking, {c} helpers came, some of them students.
        c=6-48 It took {c} helpers, among them students, to pick everything.

        What is made from the fruit?
        d=20-60/5 About {d} percent is pressed into juice; the rest is sold at the market in {town2}.
        d=20-60/5 The market in {town2} takes most of it, and {d} percent becomes juice.

        What are the sheep for?
        Sheep keep the grass short, so that no machine is needed.
        No machine cuts the grass, because a small flock of sheep keeps it short.

        What is planned for next year?
        Next year {name2} will open a small cafe in the old barn.
        In the old barn, {name2} wants to open a small cafe next year.
    """),
    _beats("""
        Who went on the expedition, and where did it start?
        In {month}, {name} {surname} and {name2} {surname2} set out from {town} to cross the plateau on skis.
        {name} {surname} and {name2} {surname2} left {town} in {month} to cross the plateau on skis.

        How long was the route?
        a=120-480/10 The route of {a} kilometers led over two passes and a frozen lake.
        a=120-480/10 They had {a} kilometers ahead of them, with two passes and a frozen lake.

        How much food did they carry?
        b=20-60 Their sleds carried {b} kilograms of food, mostly rice, nuts and chocolate.
        b=20-60 They pulled sleds with {b} kilograms of food, mainly rice, nuts and chocolate.

        How cold was it at night?
        c=12-40 At night the temperature fell to {c} degrees below zero.
        c=12-40 The nights were cold: {c} degrees below zero.

        What broke, and how was it repaired?
        On day {3-9} a ski broke and was repaired with wire and a {color} tent pole.
        A ski that broke on day {3-9} was fixed with wire and a {color} tent pole.

        What animals did they see?
        They saw reindeer, a white hare and, one morning, the tracks of a wolf.
        Reindeer, a white hare and the tracks of a wolf were all they saw of other life.

        How long did they wait in the tent?
        d=2-6 A snowstorm kept them in the tent for {d} days, and they played cards.
        d=2-6 For {d} days they played cards in the tent while a snowstorm passed.

        When did they arrive?
        They reached {town2} on {date}, tired and hungry, and were met by a {job}.
        On {date} they arrived in {town2}, where a {job} was waiting with hot soup.
    """),
    _beats("""
        Where did the science fair take place, and how many projects were shown?
        a=20-90 At the science fair of the school in {town}, pupils showed {a} projects on {weekday}.
        a=20-90 On {weekday}, {a} projects were shown at the science fair of the school in {town}.

        Who won first prize, and for what?
        First prize went to {name} {surname} for a machine that sorts buttons by color.
        A machine that sorts buttons by color won the first prize for {name} {surname}.

        How long did the winner work on it?
        b=3-14 The work took {b} weeks and used parts of an old printer.
        b=3-14 It was built in {b} weeks out of an old printer.

        What was the second prize for?
        Second prize was given to {name2} {surname2}, who measured how music affects plants.
        {name2} {surname2} took second prize with a study of how music affects plants.

        What was the prize money?
        c=50-400/50 The winner received {c} dollars and a visit to a laboratory in {town2}.
        c=50-400/50 A visit to a laboratory in {town2} and {c} dollars were the reward.

        Who was on the jury?
        The jury was made up of a {job}, a {job2} and a former pupil.
        A {job}, a {job2} and a former pupil formed the jury.

        What went wrong at the fair?
        One project, a model volcano, stained the floor {color}, but nobody minded.
        A model volcano stained the floor {color}, to general amusement.

        When is the next fair?
        The next fair is planned for {month}, and registration begins on {date}.
        Registration for the next fair, which is planned for {month}, begins on {date}.
    """),
]
