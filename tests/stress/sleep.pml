/* Falling asleep and waking of zapex/machine/waiting.py: no wake-up is lost, and a waker that dies after it
 * published delays its waiter by no more than one sleep.
 *
 * spin -a sleep.pml && cc -DSAFETY -o pan pan.c && ./pan         no errors
 * A full fence keeps a store before a later load; with it taken away (-D NO_...) the load may be
 * done first, and the check must fail.
 */
#define ITEMS 3

byte published;
bool sleeping, event, died;

proctype Waker() {
    bool asleep;
    do
    :: published == ITEMS -> break
    :: published < ITEMS ->
#ifdef NO_WAKER_FENCE
        if
        :: asleep = sleeping; published++
        :: published++; asleep = sleeping
        fi;
#else
        published++;
        if :: died = true; goto reborn :: true fi;      /* it dies before it wakes */
        asleep = sleeping;      /* SYNC sleep */
#endif
        if :: asleep -> event = true :: else fi;
reborn: skip
    od
}

proctype Waiter() {
    byte seen, now;
    do
    :: seen == ITEMS -> break
    :: seen < ITEMS ->
        now = published;
        if :: now > seen -> seen = now; goto again :: else fi;
#ifdef NO_WAITER_FENCE
        if
        :: now = published; sleeping = true
        :: sleeping = true; now = published
        fi;
#else
        sleeping = true;
        now = published;        /* SYNC sleep: ready() looks after the declaration */
#endif
        do
        :: now > seen -> break
        :: now == seen ->
            if
            :: event -> event = false
#ifndef NO_SLEEP_LIMIT
            :: timeout -> assert(died)      /* only a dead waker is a reason to oversleep */
#endif
            fi;
            now = published
        od;
        sleeping = false;
        seen = now;
again:  skip
    od
}

init { atomic { run Waker(); run Waiter() } }
