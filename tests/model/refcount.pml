/* The life of a page, for the model checker spin: who may write it, and when its slot is free.
 *
 * Three contexts, each of one thread, and the prefix tree share three slots.  What kvcore does
 * under its lock is one step here, as it is for all who take the lock; each changes the count of
 * one page once, so that who reads a count without it sees no other values either.  What it does
 * outside (the test for a sole holder, reads, clones, writes) is interleaved with everything.
 * Slots are alike, so the first free one is issued.
 *
 * Lemma: a page whose sole holder is a live context has no other forker, so that the holder may
 * write it without a lock.  Asserted: nobody reads or holds a page while it is written; a slot that
 * is issued is held and read by nobody; after each locked section refs is the number of holders.
 *
 * Variants that must be caught, one macro each:
 *   BROKEN_FORK   a live context is forked by another thread than its owner's
 *   BROKEN_DROP   the old page is let go of before the clone is made
 *   BROKEN_COUNT  a reference is counted without the lock
 *   BROKEN_SOLE   the test for a sole holder leaves entries out
 *   BROKEN_EVICT  a page is taken from the tree's holders and from the contexts' too
 *
 *   spin -a [-DBROKEN_...] refcount.pml && cc -O2 -DSAFETY -DCOLLAPSE -o pan pan.c && ./pan */

#define NONE 3

byte refs[3], tree[3];       /* tree: holders that are entries, at most one here */
byte readers[3], writers[3]; /* who is at it, outside the lock */
byte page[3] = NONE;         /* what each context holds */
byte old[3] = NONE;          /* and while it clones, the page that it clones */
bool busy[3], frozen[3];

#define HOLDERS(s) \
    (tree[s] + (page[0] == s) + (page[1] == s) + (page[2] == s) + (old[0] == s) + (old[1] == s) + (old[2] == s))

/* At the end of each step under the lock. */
#define AUDIT assert(refs[0] == HOLDERS(0) && refs[1] == HOLDERS(1) && refs[2] == HOLDERS(2))

#define NEXT ((me + 1) % 3)

#ifdef BROKEN_SOLE
#define SOLE(s) (refs[s] - tree[s] == 1)
#else
#define SOLE(s) (refs[s] == 1)
#endif

#ifdef BROKEN_FORK
#define FORKABLE(c) (page[c] != NONE)
#else
#define FORKABLE(c) (page[c] != NONE && frozen[c])
#endif

/* The first free slot, or NONE.  Nobody may be at it still. */
inline take(q)
{
    if
    :: refs[0] == 0 -> q = 0
    :: else ->
        if
        :: refs[1] == 0 -> q = 1
        :: else ->
            if
            :: refs[2] == 0 -> q = 2
            :: else -> q = NONE
            fi
        fi
    fi;
    if
    :: q != NONE ->
        assert(readers[q] == 0 && writers[q] == 0);
        refs[q] = 1
    :: else
    fi
}

inline read(p)
{
    d_step { assert(writers[p] == 0); readers[p]++ };
    d_step { assert(writers[p] == 0); readers[p]-- }
}

/* Nobody else may read it or hold it from here to the end. */
inline write(p)
{
    d_step { assert(writers[p] == 0 && readers[p] == 0 && refs[p] == 1); writers[p]++ };
    d_step { assert(readers[p] == 0 && refs[p] == 1); writers[p]-- }
}

inline let_go(p)
{
    d_step { refs[p]--; old[me] = NONE; AUDIT }
}

proctype context(byte me)
{
    byte p = NONE, q = NONE;

    do
    /* Append: in place where nobody else holds the page, else into a clone. */
    :: atomic { page[me] != NONE && !busy[me] && !frozen[me] -> busy[me] = true; p = page[me] };
        if
        :: SOLE(p) -> write(p)
        :: else ->
            d_step {
                take(q);
                if
                :: q != NONE -> old[me] = p; page[me] = q
                :: else
                fi;
                AUDIT
            };
            if
            :: q != NONE ->
#ifdef BROKEN_DROP
                let_go(p);
                read(p);
                write(q)
#else
                read(p);
                write(q);
                let_go(p)
#endif
            :: else
            fi
        fi;
        d_step { p = NONE; q = NONE; busy[me] = false }

    /* Read, as a snapshot or an attention does. */
    :: atomic { page[me] != NONE && !busy[me] -> busy[me] = true; p = page[me] };
        read(p);
        d_step { p = NONE; busy[me] = false }

    /* A first page. */
    :: d_step { page[me] == NONE && !busy[me] -> busy[me] = true; take(q); page[me] = q; AUDIT };
        if
        :: q != NONE -> write(q)
        :: else
        fi;
        d_step { q = NONE; busy[me] = false }

    /* Fork of another's frozen context: the child is this thread's. */
    :: d_step {
            page[me] == NONE && !busy[me] && FORKABLE(NEXT) ->
            page[me] = page[NEXT];
            refs[page[me]]++;
            AUDIT
        }

    /* Fork of the thread's own context, handed to another thread. */
#ifdef BROKEN_COUNT
    :: atomic {
            page[me] != NONE && !busy[me] && page[NEXT] == NONE && !busy[NEXT] ->
            busy[me] = true;
            busy[NEXT] = true;
            q = refs[page[me]]
        };
        d_step {
            refs[page[me]] = q + 1;
            page[NEXT] = page[me];
            q = NONE;
            busy[me] = false;
            busy[NEXT] = false;
            AUDIT
        }
#else
    :: d_step {
            page[me] != NONE && !busy[me] && page[NEXT] == NONE && !busy[NEXT] ->
            page[NEXT] = page[me];
            refs[page[me]]++;
            AUDIT
        }
#endif

    /* Publish: the tree becomes a holder. */
    :: d_step {
            page[me] != NONE && !busy[me] && tree[page[me]] == 0 ->
            tree[page[me]] = 1;
            refs[page[me]]++;
            AUDIT
        }

    /* Match: a fork out of the tree. */
    :: d_step { page[me] == NONE && !busy[me] && tree[0] > 0 -> page[me] = 0; refs[0]++; AUDIT }
    :: d_step { page[me] == NONE && !busy[me] && tree[1] > 0 -> page[me] = 1; refs[1]++; AUDIT }
    :: d_step { page[me] == NONE && !busy[me] && tree[2] > 0 -> page[me] = 2; refs[2]++; AUDIT }

    :: d_step { page[me] != NONE && !busy[me] && !frozen[me] -> frozen[me] = true }

    /* Close. */
    :: d_step {
            page[me] != NONE && !busy[me] ->
            refs[page[me]]--;
            page[me] = NONE;
            frozen[me] = false;
            AUDIT
        }
    od
}

#ifdef BROKEN_EVICT
#define EVICTABLE(s) (tree[s] > 0)
#define TAKE_BACK(s) refs[s] = 0
#else
#define EVICTABLE(s) (tree[s] > 0 && refs[s] == tree[s])
#define TAKE_BACK(s) refs[s]--
#endif

/* Takes back pages that only entries hold. */
proctype evict()
{
    do
    :: d_step { EVICTABLE(0) -> TAKE_BACK(0); tree[0] = 0; AUDIT }
    :: d_step { EVICTABLE(1) -> TAKE_BACK(1); tree[1] = 0; AUDIT }
    :: d_step { EVICTABLE(2) -> TAKE_BACK(2); tree[2] = 0; AUDIT }
    od
}

init
{
    atomic {
        run context(0);
        run context(1);
        run context(2);
        run evict()
    }
}
