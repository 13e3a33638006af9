/* The mailbox of zapex/machine/mailbox.py: every order of steps, a writer that dies at every step (now
 * and then for good), values of two halves.
 *
 * spin -a mailbox.pml && cc -DSAFETY -o pan pan.c && ./pan       no errors
 * A barrier is program order kept; with it taken away (-D NO_...) the check must fail.
 */
#ifndef CELLS
#define CELLS 3
#endif
#define VERSIONS 4
#define CRASHES 2

byte version, cell;                 /* latest: one word, one store */
byte stamp[CELLS], low[CELLS], high[CELLS];
bool alive = true;
byte life;                          /* which life of the writer this is; part of its values */

#define CRASH_POINT if :: life < CRASHES -> alive = false; goto dead :: true fi
#define WRITE_LOW low[next] = 4 * (version + 1) + life
#define WRITE_HIGH high[next] = 4 * (version + 1) + life
#define LATEST atomic { version = version + 1; cell = next }

proctype Writer() {
    byte next;
reborn:
    do
    :: version == VERSIONS -> break
    :: version < VERSIONS ->
        next = (cell + 1) % CELLS;
        CRASH_POINT;
#ifdef NO_STAMP_FENCE               /* a byte of the new value may be seen before the stamp */
        if :: WRITE_LOW :: true fi;
#endif
#ifndef NO_STAMP
        stamp[next] = 0;
#endif
        CRASH_POINT;                /* SYNC reuse: release fence */
#ifdef NO_RELEASE_LATEST            /* `latest` may be seen before the value and its stamp */
        if
        :: WRITE_LOW; stamp[next] = version + 1; LATEST;
           high[next] = 4 * version + life; goto reborn
        :: true
        fi;
#endif
        if :: stamp[next] = version + 1 :: true fi;     /* relaxed: `latest` covers it */
        WRITE_LOW;
        CRASH_POINT;
        WRITE_HIGH;
        CRASH_POINT;
        stamp[next] = version + 1;
        CRASH_POINT;
        LATEST;                     /* SYNC whole */
        CRASH_POINT
    od;
    goto end;
dead:
    if
    :: atomic { life++; alive = true }; goto reborn
    :: true                         /* for good */
    fi;
end: skip
}

proctype Reader() {
    byte seen, v, c, a, b, s, guess, before;
    bool quiet;
    do
    :: seen == version && (!alive || version == VERSIONS) -> break
    :: version > seen ->
        guess = CELLS;
#ifdef NO_ACQUIRE_LATEST            /* a byte of the value may be read before `latest` */
        if
        :: guess = 0 :: CELLS > 1 -> guess = 1 :: CELLS > 2 -> guess = 2 :: true
        fi;
        if :: guess < CELLS -> a = low[guess] :: else fi;
#endif
        atomic { v = version; c = cell; quiet = !alive; before = life };    /* SYNC whole */
#ifdef NO_ACQUIRE_FENCE             /* the stamp may be read before the value */
        s = stamp[c];
#endif
        if :: guess != c -> a = low[c] :: else fi;
        b = high[c];
#ifndef NO_ACQUIRE_FENCE
        s = stamp[c];               /* SYNC reuse: after an acquire fence */
#endif
        if
#ifdef NO_RECHECK
        :: true ->
#else
        :: s == v ->
#endif
            assert(v > seen);                   /* versions only grow */
            assert(a == b && a / 4 == v);       /* whole, and this version's */
            seen = v
        :: s != v ->
            assert(!quiet || life != before)    /* what a dead writer leaves can be read */
        fi
    od
}

init { atomic { run Writer(); run Reader() } }
