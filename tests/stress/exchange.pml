/* The exchange of zapex/machine/exchange.py: one place; who asks and who answers die at every step,
 * who asks now and then for good. Items and values are of two halves; a question's are its life's.
 *
 * spin -a exchange.pml && cc -DSAFETY -o pan pan.c && ./pan      no errors
 * A barrier is program order kept; with it taken away (-D NO_...) the check must fail.
 */
#define QUESTIONS 4
#define CRASHES 2
#define TAG (16 * life + n)

byte asked, answered;               /* the two words; each has one writer */
byte low, high;                     /* items */
byte value_low, value_high;
byte life, deaths;                  /* of who asks, of who answers */

#define ASKER_DIES if :: life < CRASHES -> goto dead :: true fi
#define ANSWERER_DIES if :: deaths < CRASHES -> deaths++; goto again :: true fi

proctype Asker() {
    byte n, early;
reborn:
#ifdef NO_GROWTH                    /* each life counts from 0 again */
    n = 0;
#else
    n = asked;
#endif
    do
    :: n >= QUESTIONS -> break
    :: n < QUESTIONS ->
        n++;
#ifdef NO_RELEASE_ASKED             /* the number may be seen before the items */
        if :: asked = n :: true fi;
#endif
        low = TAG;
        ASKER_DIES;
        high = TAG;
        ASKER_DIES;
        asked = n;                  /* SYNC asked */
        ASKER_DIES;
#ifdef NO_ACQUIRE_ANSWERED          /* a value may be read before the number */
        early = value_low;
#endif
#ifdef NO_OWN_NUMBER                /* any new answer is taken */
        answered > 0;
#else
        answered == n;              /* SYNC answered */
#endif
#ifndef NO_ACQUIRE_ANSWERED
        early = value_low;
#endif
        assert(early == TAG);
        ASKER_DIES;
        assert(value_high == TAG)
    od;
    goto end;
dead:
    if
    :: life++; goto reborn
    :: true                         /* for good */
    fi;
end:
    skip
}

proctype Answerer() {
    byte n, first, second;
again:
#ifdef NO_ACQUIRE_ASKED             /* an item may be read before the number */
    first = low;
#endif
end:
    asked != answered;              /* SYNC asked */
    n = asked;
#ifndef NO_ACQUIRE_ASKED
    first = low;
#endif
    ANSWERER_DIES;
    second = high;
#ifdef NO_RELEASE_ANSWERED          /* the number may be seen before the values */
    if :: answered = n :: true fi;
#endif
    value_low = first;
    ANSWERER_DIES;
    value_high = second;
    ANSWERER_DIES;
#ifdef NO_NUMBER_FIRST              /* the number is looked at after the items */
    n = asked;
#endif
    answered = n;                   /* SYNC answered */
    ANSWERER_DIES;
    goto again
}

init { run Asker(); run Answerer() }
