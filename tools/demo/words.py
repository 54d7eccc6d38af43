"""The vocabulary the example generators draw from: common words and Unicode ranges."""

_WORDS = """
apple arm art baby bag ball band bank base bed bell bird blue board boat body book box boy
bread bridge brown bus cake camp car card cat chair child city class clock cloud coat coffee
cold cook corn cup dance dark day deer desk dog door dream dress drum east egg eye face fall
farm fast father field fire fish flag floor flower fly food foot forest fox friend frog fruit
game garden gate girl glass gold grass green hand hat head heart hill home honey horse house
ice ink iron island jam job juice key king kitchen kite lake lamp leaf lemon letter light lion
list little love map market milk mind moon morning mother mountain mouse music name nest new
night north nose ocean old orange owl page paint paper park party pen piano picture pie pig
place plane plant plate pond queen quick quiet rain red rice ring river road rock roof room
rose salt sand school sea seed sheep ship shoe shop silver sister sky small snow song south
spoon spring square star stone storm story street sugar summer sun table tea tent the thing
time town train tree truck turtle uncle valley voice wall warm water west wheel white wind
window winter wolf wood word work world yard yellow zebra
"""

_ACCENTED_WORDS = """
café naïve über señor déjà façade Zürich jalapeño crème brûlée Köln Ångström piñata résumé
garçon fête Müller Straße größe año mañana São João coração niño élève hôtel noël œuvre smörgås
fjörd Łódź žluťoučký kůň Dvořák háček ørsted Tromsø
"""

COMMON_HANZI = (
    "的一是不了人我在有他这中大来上国个到说们为子和你地出道也时年得就那要下以生会自着去之过家学"
    "对可她里后小么心多天而能好都然没日于起还发成事只作当想看文无开手十用主行方又如前所本见经头面"
)

# Inclusive code point ranges; every range is stable under NFC so that a copy is byte-exact.
EMOJI_RANGES: tuple[tuple[int, int], ...] = (
    (0x1F300, 0x1F5FF),
    (0x1F600, 0x1F64F),
    (0x1F680, 0x1F6C0),
    (0x1F910, 0x1F9FF),
)
SCRIPT_RANGES: tuple[tuple[int, int], ...] = (
    (0x00DF, 0x00F6),
    (0x0100, 0x0130),
    (0x0391, 0x03A1),
    (0x03B1, 0x03C9),
    (0x0410, 0x044F),
    (0x05D0, 0x05EA),
    (0x3041, 0x3096),
    (0x30A1, 0x30FA),
    (0xAC00, 0xD7A3),
)
HANZI_RANGE: tuple[int, int] = (0x4E00, 0x9FA5)

_VERBS = "get set find add send open make move show call read play book start stop check"

WORDS = tuple(_WORDS.split())
ACCENTED_WORDS = tuple(_ACCENTED_WORDS.split())
VERBS = tuple(_VERBS.split())
