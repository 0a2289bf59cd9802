#ifndef BATON_BASE_LIST_H
#define BATON_BASE_LIST_H

#include <stdbool.h>
#include <stddef.h>

/*
 * Intrusive doubly linked list. The head and each member hold a struct list; the head alone is a
 * ring of one. The list owns nothing. A member that is in no list is a ring of one as well (or all
 * zero before its first use), so list_remove may be called on it again.
 */
struct list {
    struct list *prev, *next;
};

static inline void list_init(struct list *head)
{
    head->prev = head->next = head;
}

static inline bool list_empty(const struct list *head)
{
    return head->next == head;
}

/* Whether a member (not a head) is in some list now. */
static inline bool list_linked(const struct list *member)
{
    return member->next != NULL && member->next != member;
}

static inline void list_insert_after(struct list *where, struct list *member)
{
    member->prev = where;
    member->next = where->next;
    where->next->prev = member;
    where->next = member;
}

static inline void list_push_front(struct list *head, struct list *member)
{
    list_insert_after(head, member);
}

static inline void list_push_back(struct list *head, struct list *member)
{
    list_insert_after(head->prev, member);
}

static inline void list_remove(struct list *member)
{
    if (member->next != NULL) {
        member->prev->next = member->next;
        member->next->prev = member->prev;
    }
    list_init(member);
}

/* First or last member, or NULL when the list is empty. */
static inline struct list *list_first(const struct list *head)
{
    return list_empty(head) ? NULL : head->next;
}

static inline struct list *list_last(const struct list *head)
{
    return list_empty(head) ? NULL : head->prev;
}

/* The struct of the given type whose field called member is *p. */
#define list_entry(p, type, member) ((type *)(void *)((char *)(p)-offsetof(type, member)))

/* Visits each member from the front; the body may not remove the one that it is at. */
#define list_for_each(p, head) for (struct list *p = (head)->next; p != (head); p = p->next)

/* The same, and the body may remove (and free) the one that it is at. */
#define list_for_each_safe(p, head)                                       \
    for (struct list *p = (head)->next, *p##_next = p->next; p != (head); \
         p = p##_next, p##_next = p->next)

#endif
